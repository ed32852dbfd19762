"""Attention kernels for Hopper (sm_90) in Pallas's Mosaic GPU lowering.

`forward.py` is the kernel, `tile_sizes.py` its tuned sizes and the shared-memory budget, `work.py`
the order in which persistent CTAs take query tiles, and `attention.py` the implementation named
"mosaic" that `dot_product_attention` chooses from.
"""

from pallas_flash.hopper.tile_sizes import ForwardTiles, default_forward_tiles

__all__ = ["ForwardTiles", "default_forward_tiles"]
