"""Tile sizes: the papers' rule from the SRAM size, and the rule for the scan in `xla`."""

from __future__ import annotations

import dataclasses
import math

from pallas_flash.call import Sizes


@dataclasses.dataclass(frozen=True)
class TileSizes:
    """Rows of q and of k, v that are worked on at a time.

    Attributes:
      block_q: queries per tile (the papers' B_r).
      block_kv: keys and values per tile (the papers' B_c).
    """

    block_q: int
    block_kv: int

    def __post_init__(self) -> None:
        for name in ("block_q", "block_kv"):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} must be a positive int, got {size!r}")


def from_sram(sram_elements: int, head_dim: int) -> TileSizes:
    """FlashAttention-1's tile sizes for an SRAM of M elements and head dimension d.

        B_c = ceil(M / 4d),   B_r = min(ceil(M / 4d), d)

    so that the tiles of q, k, v and the output take about a quarter of the SRAM each, and the
    B_r x B_c tile of scores no more than B_c * d.

    Args:
      sram_elements: M, in elements (bytes / bytes per element).
      head_dim: d, of queries, keys and values.

    Source: Dao et al. 2022, Algorithm 1, line 1 (arXiv:2205.14135).

    >>> from_sram(100_000, 64)
    TileSizes(block_q=64, block_kv=391)
    """
    if head_dim < 1:
        raise ValueError(f"head_dim must be positive, got {head_dim}")
    if sram_elements < 4 * head_dim:
        raise ValueError(
            f"sram_elements={sram_elements} cannot hold one row of q, k, v and output of "
            f"head_dim={head_dim}: at least {4 * head_dim} are needed"
        )
    block_kv = math.ceil(sram_elements / (4 * head_dim))
    return TileSizes(block_q=min(block_kv, head_dim), block_kv=block_kv)


@dataclasses.dataclass(frozen=True)
class _ScanLimits:
    """Limits on one tile of scores, all heads together: bytes, and rows or columns."""

    whole_bytes: int
    tile_bytes: int
    smallest: int
    largest: int


# CPU: scores that stay in a core's cache; larger tiles were up to 3 times slower on two cores at
# B, T, N, H = 8, 512, 4, 64. Elsewhere each tile costs kernel launches, so tiles are large.
_SCAN_CPU = _ScanLimits(whole_bytes=2**22, tile_bytes=2**20, smallest=64, largest=512)
_SCAN_OTHER = _ScanLimits(whole_bytes=2**26, tile_bytes=2**26, smallest=128, largest=1024)


def for_scan(sizes: Sizes, itemsize: int = 4, platform: str = "cpu") -> TileSizes:
    """Tile sizes for the scan over tiles in plain JAX.

    Batch and heads are worked on together, so their product counts. A call whose whole score
    matrix is small is one tile: short sequences, as in training small models, pay for no loop.
    Otherwise tiles are halved, keys first, until the scores of all heads fit.

    Args:
      sizes: of the call.
      itemsize: bytes per score.
      platform: where it runs.

    >>> for_scan(Sizes(B=16, T=128, S=128, N=4, K=4, H=32, Hv=32))
    TileSizes(block_q=128, block_kv=128)
    >>> for_scan(Sizes(B=8, T=512, S=512, N=4, K=4, H=64, Hv=64))
    TileSizes(block_q=128, block_kv=64)
    >>> for_scan(Sizes(B=1, T=16384, S=16384, N=1, K=1, H=64, Hv=64))
    TileSizes(block_q=512, block_kv=512)
    """
    limits = _SCAN_CPU if platform == "cpu" else _SCAN_OTHER
    per_score = max(1, sizes.B * sizes.N) * itemsize
    whole = max(sizes.T, sizes.S) <= limits.largest
    if whole and sizes.T * sizes.S * per_score <= limits.whole_bytes:
        return TileSizes(sizes.T, sizes.S)
    block_q, block_kv = limits.largest, limits.largest
    while block_q * block_kv * per_score > limits.tile_bytes and block_q > limits.smallest:
        if block_kv == block_q:
            block_kv //= 2
        else:
            block_q //= 2
    return TileSizes(min(block_q, sizes.T), min(block_kv, sizes.S))
