"""FlashAttention-1 as its paper writes it: the double loop, and what it moves through HBM.

For reading, teaching and testing: Python loops over NumPy-like slices, one head, no batch. The
kernels follow FlashAttention-2, whose outer loop runs over queries.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_flash import tiles
from pallas_flash.online_softmax import State, empty, finalise, update


class Traffic(NamedTuple):
    """Elements read from and written to HBM."""

    reads: int
    writes: int

    @property
    def total(self) -> int:
        return self.reads + self.writes


def forward(
    q: Float[Array, "T d"],
    k: Float[Array, "S d"],
    v: Float[Array, "S d"],
    sram_elements: int,
) -> tuple[Float[Array, "T d"], Array, Traffic]:
    """Attention softmax(q k^T) v by the double loop: key blocks outside, query blocks inside.

    The running state of every query lives in HBM between two key blocks, as in the paper (which
    keeps the output divided by l; here it is divided once, at the end). Nothing is scaled: pass
    q / sqrt(d).

    Args:
      q, k, v: (T, d), (S, d), (S, d).
      sram_elements: M, which fixes the block sizes (`tiles.from_sram`).

    Returns: output (T, d), LSE of shape (T,), and the traffic that the loop counted.

    Source: Dao et al. 2022, Algorithm 1 (arXiv:2205.14135).
    """
    (T, d), S = q.shape, len(k)
    sizes = tiles.from_sram(sram_elements, d)
    in_hbm: dict[int, State] = {}
    reads = writes = 0
    for j in range(0, S, sizes.block_kv):
        k_j, v_j = k[j : j + sizes.block_kv], v[j : j + sizes.block_kv]
        reads += k_j.size + v_j.size
        for i in range(0, T, sizes.block_q):
            q_i = q[i : i + sizes.block_q]
            state = in_hbm.get(i) or empty((len(q_i),), d, q.dtype)
            state = update(state, q_i @ k_j.T, v_j)
            in_hbm[i] = state
            reads += q_i.size + _state_size(state)
            writes += _state_size(state)
    out, lse = finalise(State(*(jnp.concatenate(x) for x in zip(*in_hbm.values(), strict=True))))
    return out, lse, Traffic(reads, writes)


def _state_size(state: State) -> int:
    return state.m.size + state.l.size + state.o.size


def flash_traffic(n: int, d: int, sram_elements: int) -> Traffic:
    """HBM traffic of FlashAttention-1 for n queries and keys: Theta(n^2 d^2 / M).

        T_c = ceil(n / B_c) passes over q and the state, one pass over k and v:
        reads  = 2 n d + T_c (n d + n (d + 2)),   writes = T_c n (d + 2)

    Source: Dao et al. 2022, Theorem 2 (arXiv:2205.14135).

    >>> flash_traffic(1024, 64, 25_600)
    Traffic(reads=1595392, writes=743424)
    """
    passes = math.ceil(n / tiles.from_sram(sram_elements, d).block_kv)
    state = n * (d + 2)
    return Traffic(2 * n * d + passes * (n * d + state), passes * state)


def standard_traffic(n: int, d: int) -> Traffic:
    """HBM traffic of standard attention for n queries and keys: Theta(n d + n^2).

        S = q k^T: read 2 n d, write n^2;  P = softmax(S): read n^2, write n^2;
        out = P v: read n^2 + n d, write n d

    Source: Dao et al. 2022, Algorithm 0 and Theorem 2 (arXiv:2205.14135).

    >>> standard_traffic(1024, 64)
    Traffic(reads=2293760, writes=2162688)
    """
    return Traffic(2 * n * n + 3 * n * d, 2 * n * n + n * d)
