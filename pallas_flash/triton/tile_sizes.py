"""Tile sizes of the Triton kernels: what one program holds, and with how many warps."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax.typing import DTypeLike

# Triton's dot needs at least 16 rows, columns and contracted elements.
SMALLEST_DOT = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """One kernel's tile: `query` x `key` logits at a time, in `warps` warps.

    `stages` is the depth of the software pipeline over the inner loop's loads: stages - 1 tiles
    are in flight in shared memory while one is computed on.
    """

    query: int  # query rows per tile
    key: int  # key/value rows per tile
    warps: int  # warps per program
    stages: int  # software pipeline depth of the inner loop

    def __post_init__(self):
        for name in ("query", "key"):
            size = getattr(self, name)
            if size < SMALLEST_DOT or size & (size - 1):
                raise ValueError(
                    f"Tile.{name} must be a power of two >= {SMALLEST_DOT} (Triton's dot takes "
                    f"no other), got {size}; use 16, 32, 64 or 128."
                )
        if self.warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"Tile.warps must be 1, 2, 4, 8 or 16, got {self.warps}.")
        if self.stages < 1:
            raise ValueError(f"Tile.stages must be at least 1, got {self.stages}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileSizes:
    """The tiles of the three kernels. Pass one to `triton.attention` to time a variant."""

    forward: Tile
    dq: Tile  # dQ: loops over key tiles, holds one query tile
    dkv: Tile  # dK, dV: loops over query tiles, holds one key tile


def padded_head_dim(head_dim: int) -> int:
    """Smallest power of two that holds `head_dim`: Triton's blocks have no other size.

    >>> [padded_head_dim(h) for h in (8, 64, 72, 128, 192)]
    [16, 64, 128, 128, 256]
    """
    return max(SMALLEST_DOT, 1 << (head_dim - 1).bit_length())


# Compute capabilities (Ampere's and Ada's small chips, Blackwell's consumer chips) whose blocks get
# 99 KiB of shared memory; A100 has 163 KiB and H100 227 KiB.
SMALL_SHARED_MEMORY = (86, 89, 120, 121)


def default_tile_sizes(
    head_dim: int,
    dtype: DTypeLike,
    *,
    compute_capability: int | None = None,
    has_square_input: bool = False,
) -> TileSizes:
    """Tiles that keep every accumulator in registers on Ampere, Ada and Hopper.

    A program holds its accumulators (one `query` x H forward, two `key` x H in dK/dV) and two
    tiles of logits in the 255 registers of each of its 32 * warps threads; that, more than shared
    memory, bounds the tile as H grows. float32 runs without tensor cores, so its tiles are small.

    Args:
      head_dim: the larger of the head dims of query and value.
      dtype: of query, key and value.
      compute_capability: of the GPU, as 89 for Ada's 8.9; None where shared memory is no limit.
      has_square_input: a bias or mask of (T, S) is loaded by tiles too.
    """
    tiles = _roomy_tile_sizes(head_dim, dtype)
    if compute_capability is None:
        return tiles
    small = compute_capability in SMALL_SHARED_MEMORY
    if has_square_input and (small or compute_capability < 90):
        return _map(_halved, tiles)
    if small and head_dim > 128:
        return _map(_unpipelined, tiles)
    return tiles


def _map(change: Callable[[Tile], Tile], tiles: TileSizes) -> TileSizes:
    return TileSizes(forward=change(tiles.forward), dq=change(tiles.dq), dkv=change(tiles.dkv))


def _unpipelined(tile: Tile) -> Tile:
    """Loads that are not pipelined need no buffers in shared memory."""
    return dataclasses.replace(tile, stages=1)


def _halved(tile: Tile) -> Tile:
    """A quarter of the tile, not pipelined."""
    query, key = (max(SMALLEST_DOT, size // 2) for size in (tile.query, tile.key))
    return dataclasses.replace(tile, query=query, key=key, stages=1)


def _roomy_tile_sizes(head_dim: int, dtype: DTypeLike) -> TileSizes:
    width = padded_head_dim(head_dim)
    if jnp.dtype(dtype) == jnp.float32:
        return _same(Tile(query=32, key=32 if width <= 64 else 16, warps=4, stages=1))
    if width <= 64:
        return TileSizes(
            forward=Tile(query=128, key=64, warps=4, stages=3),
            dq=Tile(query=128, key=64, warps=8, stages=3),
            dkv=Tile(query=64, key=128, warps=8, stages=3),
        )
    if width == 128:
        return TileSizes(
            forward=Tile(query=128, key=64, warps=8, stages=3),
            dq=Tile(query=128, key=64, warps=8, stages=2),
            dkv=Tile(query=64, key=128, warps=8, stages=2),
        )
    return TileSizes(
        forward=Tile(query=64, key=32, warps=4, stages=2),
        dq=Tile(query=64, key=32, warps=8, stages=2),
        dkv=Tile(query=32, key=64, warps=8, stages=2),
    )


def _same(tile: Tile) -> TileSizes:
    return TileSizes(forward=tile, dq=tile, dkv=tile)
