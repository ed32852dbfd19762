"""Attention in Pallas for the Triton lowering: FlashAttention-2's kernels, forward and backward.

For Ampere and Ada GPUs, and for the Pallas interpreter: where there is no GPU the very same
kernels run interpreted, so that a CPU can test them. JAX deprecates this lowering; nothing outside
this folder depends on it.

It serves every argument of `dot_product_attention` with its gradient, any T and S, head dims up to
256 and grouped heads, in bfloat16, float16 and true float32. `unsupported` names what is left.
"""

from pallas_flash.triton.attention import NAME, attention, backward, forward, unsupported
from pallas_flash.triton.tile_sizes import Tile, TileSizes, default_tile_sizes

__all__ = [
    "NAME",
    "Tile",
    "TileSizes",
    "attention",
    "backward",
    "default_tile_sizes",
    "forward",
    "unsupported",
]
