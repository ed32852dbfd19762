"""Block masks: a mask function looked at once, so that its empty tiles are never visited."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int8

from pallas_flash.mods import INDICES, Mod

EMPTY, PARTIAL, FULL = 0, 1, 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockMask:
    """A mask function with what it shows of each block; pass it as `mask_mod`.

    Attributes:
      mod: the traced mask function.
      kinds: (B|1, N|1, q_blocks, kv_blocks), 0 for empty, 1 for partial, 2 for full.
      block_q, block_kv: queries and keys per block.
      sizes: T and S that it was made for.
    """

    mod: Mod
    kinds: Int8[Array, "#B #N q_blocks kv_blocks"]
    block_q: int = dataclasses.field(metadata={"static": True})
    block_kv: int = dataclasses.field(metadata={"static": True})
    sizes: tuple[int, int] = dataclasses.field(metadata={"static": True})

    def visits(self, blocks: tuple[int, int]) -> Bool[Array, "#B q_tiles kv_tiles"]:
        """Which tiles of another size hold a block that is not empty, for any head."""
        seen = jnp.any(self.kinds != EMPTY, axis=1)
        seen = _regroup(seen, 1, self.sizes[0], self.block_q, blocks[0])
        return _regroup(seen, 2, self.sizes[1], self.block_kv, blocks[1])

    @property
    def sparsity(self) -> Array:
        """Part of the blocks that is empty, 0 to 1."""
        return jnp.mean(self.kinds == EMPTY)


def block_mask(
    mask_mod: Callable[..., Array],
    *,
    T: int,
    S: int,
    B: int = 1,
    N: int = 1,
    block_q: int = 128,
    block_kv: int = 128,
) -> BlockMask:
    """Evaluates a mask function on all (B, N, T, S) and keeps what it shows of each block.

    The result is reused by every call with the same T and S: make it once, outside the step. No
    more than one row of blocks is in memory at a time.

    Args:
      mask_mod: function (b, n, q_index, k_index) -> bool of scalars.
      T, S: queries and keys.
      B, N: batch rows and query heads; leave 1 where the function ignores them.
      block_q, block_kv: queries and keys per block.

    >>> causal = block_mask(lambda b, n, i, j: j <= i, T=6, S=6, block_q=2, block_kv=2)
    >>> print(causal.kinds[0, 0])
    [[1 0 0]
     [2 1 0]
     [2 2 1]]
    """
    for name, size in {
        "T": T,
        "S": S,
        "B": B,
        "N": N,
        "block_q": block_q,
        "block_kv": block_kv,
    }.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be a positive int, got {size!r}")
    mod = Mod.trace("mask_mod", mask_mod, *INDICES)
    batch, head = jnp.arange(B)[:, None, None, None], jnp.arange(N)[:, None, None]
    keys = jnp.arange(S)
    starts = jnp.arange(0, S, block_kv)

    def row_of_blocks(first: Array) -> Array:
        queries = first + jnp.arange(block_q)[:, None]
        shown = jnp.broadcast_to(mod.on_tile(batch, head, queries, keys), (B, N, block_q, S))
        # Rows behind T count for nothing: neither seen nor spoiling a full block.
        real = queries < T
        some = jnp.add.reduceat(jnp.any(shown & real, axis=2).astype(jnp.int32), starts, axis=2)
        each = jnp.add.reduceat(jnp.all(shown | ~real, axis=2).astype(jnp.int32), starts, axis=2)
        width = jnp.minimum(block_kv, S - starts)
        return jnp.where(some == 0, EMPTY, jnp.where(each == width, FULL, PARTIAL)).astype(jnp.int8)

    kinds = jax.lax.map(row_of_blocks, jnp.arange(0, T, block_q))
    return BlockMask(mod, jnp.moveaxis(kinds, 0, 2), block_q, block_kv, (T, S))


def _regroup(seen: Array, axis: int, size: int, old: int, new: int) -> Array:
    """From blocks of `old` to tiles of `new` elements: True where any overlapping block is."""
    starts = jnp.arange(0, size, new)
    first = starts // old
    last = (jnp.minimum(starts + new, size) - 1) // old
    zero = jnp.zeros_like(jnp.take(seen, jnp.array([0]), axis), dtype=jnp.int32)
    before = jnp.concatenate([zero, jnp.cumsum(seen, axis, dtype=jnp.int32)], axis)
    return jnp.take(before, last + 1, axis) > jnp.take(before, first, axis)
