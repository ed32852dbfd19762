"""Exact tiled attention for JAX.

`dot_product_attention` has the names, shapes and meaning of `jax.nn.dot_product_attention`; swap
the import. See its docstring for what it adds, and `online_softmax` for how it works.
"""

from pallas_flash.api import dot_product_attention
from pallas_flash.block_mask import BlockMask, block_mask
from pallas_flash.flax_adapter import flax_attention_fn
from pallas_flash.implementations import default_implementation

__all__ = [
    "BlockMask",
    "block_mask",
    "default_implementation",
    "dot_product_attention",
    "flax_attention_fn",
]
