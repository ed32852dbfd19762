"""Temporary memory of attention, forward and backward, as XLA's compiler reports it.

    python -m experiments.benchmarks.memory
    python -m experiments.benchmarks.memory --implementations xla triton reference --lengths 1024

Each call is compiled for this machine and not run: `memory_analysis` gives the bytes that the
program needs beside its arguments and results (the gradients are results). The last columns are the
growth when T = S doubles (2 is linear, 4 quadratic) and the float32 score matrix 4 N T^2 at the
largest T. On a CPU `triton` is the kernels' interpreter, which holds copies of every operand.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import tyro

import pallas_flash
from experiments.console import run_main

MIB = 2**20
# Compiling takes longer than anything else here, and the buffers are assigned either way.
QUICK = {"xla_backend_optimization_level": 0}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to compile."""

    implementations: tuple[str, ...] = ("xla",)
    """Names of implementations."""
    lengths: tuple[int, ...] = (8192, 16384, 32768)
    """Values of T = S, ascending."""
    heads: int = 2
    """N = K."""
    head_dim: int = 64
    """H = Hv."""
    dtype: str = "bfloat16"
    """Of query, key and value."""

    def __post_init__(self) -> None:
        if not self.lengths or self.lengths != tuple(sorted(set(self.lengths))):
            raise ValueError(f"lengths must be ascending, got {self.lengths}")
        if min(self.lengths[0], self.heads, self.head_dim) < 1:
            raise ValueError("lengths, heads and head_dim must be positive")


Operands = Callable[[int, int], dict[str, Any]]
"""Arguments of the call for (T, N): abstract arrays, or static values."""


def _segments(T: int, N: int) -> dict[str, Any]:
    del N
    ids = jax.ShapeDtypeStruct((1, T), jnp.int32)
    return {"query_segment_ids": ids, "key_value_segment_ids": ids}


KINDS: dict[str, Operands] = {
    "plain": lambda T, N: {},
    "causal": lambda T, N: {"is_causal": True},
    "bias (1, N, 1, S)": lambda T, N: {"bias": jax.ShapeDtypeStruct((1, N, 1, T), jnp.float32)},
    "segments": _segments,
    "score_mod": lambda T, N: {"score_mod": lambda score, b, n, i, j: score + jnp.sin(i - j)},
    "dropout": lambda T, N: {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)},
}


def temporary_bytes(implementation: str, kind: str, T: int, options: Options) -> int:
    """Temporaries of the compiled gradient in q, k, v (and bias) at T queries and keys."""
    x = jax.ShapeDtypeStruct((1, T, options.heads, options.head_dim), options.dtype)
    operands = KINDS[kind](T, options.heads)
    arrays = {n: a for n, a in operands.items() if isinstance(a, jax.ShapeDtypeStruct)}
    static = {n: a for n, a in operands.items() if n not in arrays}

    def loss(floats: dict[str, Any], integers: dict[str, Any]) -> jax.Array:
        attention: Any = pallas_flash.dot_product_attention
        out = attention(**floats, **integers, **static, implementation=implementation)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    floats = {n: a for n, a in arrays.items() if jnp.issubdtype(a.dtype, jnp.floating)}
    integers = {n: a for n, a in arrays.items() if n not in floats}
    floats |= {"query": x, "key": x, "value": x}
    settings = QUICK if jax.default_backend() == "cpu" else None
    gradient = jax.jit(jax.grad(loss), compiler_options=settings)
    analysis = gradient.lower(floats, integers).compile().memory_analysis()
    if analysis is None:
        raise NotImplementedError(f"the {jax.default_backend()} backend reports no memory")
    return analysis.temp_size_in_bytes


def table(options: Options) -> list[list[str]]:
    """Rows of the table, its head first."""
    largest = options.lengths[-1]
    head = ["implementation", "call", *(f"T={T} MiB" for T in options.lengths)]
    rows = [[*head, "growth", "scores MiB"]]
    for implementation in options.implementations:
        for kind in KINDS:
            sizes = [temporary_bytes(implementation, kind, T, options) for T in options.lengths]
            growth = [f"{after / before:.2f}" for before, after in itertools.pairwise(sizes)]
            scores = 4 * options.heads * largest**2 / MIB
            cells = [f"{size / MIB:.1f}" for size in sizes]
            rows.append([implementation, kind, *cells, " ".join(growth), f"{scores:.0f}"])
    return rows


def main() -> int:
    options = tyro.cli(Options, description=__doc__)
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}, N={options.heads}, H={options.head_dim}")
    for row in table(options):
        print(f"| {' | '.join(row)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
