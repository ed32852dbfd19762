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

    so that the tiles of q, k, v and the output take a quarter of the SRAM each, and the
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


# A tile of scores that fits the last-level cache of a small CPU keeps the exponentials out of
# main memory; measured on two cores in experiments/benchmarks.
SCORE_BYTES = 16 * 2**20
_SMALLEST, _LARGEST = 128, 512


def for_scan(sizes: Sizes, itemsize: int = 4) -> TileSizes:
    """Tile sizes for the scan over tiles in plain JAX.

    Batch and heads are worked on together, so their product counts: square tiles, halved from 512
    until the scores of all heads fit `SCORE_BYTES`, at least 128. A call whose whole score matrix
    fits is one tile: short sequences, as in training small models, pay for no loop.

    Args:
      sizes: of the call.
      itemsize: bytes per score.

    >>> for_scan(Sizes(B=16, T=256, S=256, N=4, K=4, H=32, Hv=32))
    TileSizes(block_q=256, block_kv=256)
    >>> for_scan(Sizes(B=1, T=16384, S=16384, N=8, K=2, H=64, Hv=64))
    TileSizes(block_q=512, block_kv=512)
    """
    per_score = max(1, sizes.B * sizes.N) * itemsize
    block_q, block_kv = min(sizes.T, 2 * _LARGEST), min(sizes.S, 2 * _LARGEST)
    if (block_q, block_kv) != (sizes.T, sizes.S):
        block_q, block_kv = min(block_q, _LARGEST), min(block_kv, _LARGEST)
    while block_q * block_kv * per_score > SCORE_BYTES and max(block_q, block_kv) > _SMALLEST:
        if block_kv >= block_q:
            block_kv = max(_SMALLEST, _power_of_two_below(block_kv))
        else:
            block_q = max(_SMALLEST, _power_of_two_below(block_q))
    return TileSizes(block_q, block_kv)


def _power_of_two_below(size: int) -> int:
    return 2 ** ((size - 1).bit_length() - 1)
