"""Random combinations of all arguments against the float64 reference, forward and gradients.

HYPOTHESIS_PROFILE=nightly runs 2,000 examples for each implementation; the default a few. Compiling
is what an example costs, so what is static comes from a pool of random calls, and an example is one
of them with arrays of its own.
"""

from __future__ import annotations

import functools
import importlib
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import IMPLEMENTATIONS, QUICK, assert_close

import pallas_flash
from pallas_flash import tiles
from pallas_flash.triton import Tile, TileSizes

pytestmark = pytest.mark.filterwarnings("ignore:.*Triton.*:DeprecationWarning")
NIGHTLY = settings().max_examples >= 100
# Calls that examples are drawn from; those of the default run have every argument among them.
POOL = list(range(400)) if NIGHTLY else [1, 7, 61, 259, 313]
# B, T, S, N, K, H, Hv
SIZES = [(1, 17, 33, 2, 1, 8, 8), (2, 40, 24, 4, 2, 16, 8), (2, 1, 37, 2, 2, 8, 16),
         (3, 33, 33, 3, 1, 24, 24), (1, 23, 1, 1, 1, 8, 8)]  # fmt: skip


@pytest.fixture(autouse=True)
def several_tiles(monkeypatch):
    """Tiles of 16, so that even these calls have several."""
    tile = Tile(query=16, key=16, warps=4, stages=1)
    small = TileSizes(forward=tile, dq=tile, dkv=tile)
    triton = importlib.import_module("pallas_flash.triton.attention")
    monkeypatch.setattr(triton, "default_tile_sizes", lambda *_, **__: small)
    monkeypatch.setattr(
        tiles, "for_scan", lambda s, *_: tiles.TileSizes(min(16, s.T), min(16, s.S))
    )


# ---- what is static ------------------------------------------------------------------------------


@functools.cache
def statics(number: int) -> dict[str, Any]:
    """Call number `number` of the pool: which arguments it has, and those that are not arrays."""
    rng = random.Random(number)

    def sometimes(share: float) -> bool:
        return rng.random() < share

    sizes = rng.choice(SIZES)
    B, T, S, N, *_ = sizes
    chosen: dict[str, Any] = {"sizes": sizes, "options": {}, "arrays": []}
    options, arrays = chosen["options"], chosen["arrays"]
    options["is_causal"] = sometimes(0.4)
    if sometimes(0.4):
        options["local_window_size"] = tuple(
            None if sometimes(0.3) else rng.randrange(30) for _ in range(2)
        )
    for name in ("query_positions", "key_value_positions"):
        if sometimes(0.2):
            arrays.append(name)
    if not arrays and sometimes(0.4):
        options["causal_alignment"] = "bottom_right"
    for share, names in {
        0.3: ["query_seq_lengths", "key_value_seq_lengths"],
        0.35: ["sinks", "alibi_slopes", "bias", "mask"],
        0.25: ["scale", "table", "dropout_rng"],
    }.items():
        arrays += [name for name in names if sometimes(share)]
    if sometimes(0.35):
        arrays += ["query_segment_ids", "key_value_segment_ids"]
    if "scale" not in arrays and sometimes(0.2):
        options["scale"] = rng.choice([0.0, -0.4, 1.3])
    if sometimes(0.3):
        options["logits_soft_cap"] = rng.choice([0.8, 5.0])
    if "dropout_rng" in arrays:
        options["dropout_rate"] = rng.choice([0.1, 0.5])
    if "table" not in arrays:
        options["deterministic"] = sometimes(0.3)
        if sometimes(0.15):
            options["score_mod"] = lambda s, b, n, i, j: jax.nn.silu(s) + 0.1 * n - b
    if sometimes(0.3):
        options["mask_mod"] = rng.choice([every_third, checkers])
        if sometimes(0.5):
            options["mask_mod"] = pallas_flash.block_mask(
                options["mask_mod"], T=T, S=S, B=B, N=N, block_q=rng.choice([8, 16]), block_kv=16
            )
    chosen["bias_axes"], chosen["mask_axes"] = rng.randrange(16), rng.randrange(16)
    return chosen


HIDES = np.random.default_rng(0).random((4, 64)) < 0.7


def every_third(b, n, i, j):
    return ((i // 8 + j // 8 + n) % 3 != b) & jnp.asarray(HIDES)[n, j]


def checkers(b, n, i, j):
    return (i // 16 + j // 16) % 2 == 0


# ---- arrays --------------------------------------------------------------------------------------


def draw(static: dict[str, Any], seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(differentiable arrays, other arrays) for a call of the pool."""
    rng = np.random.default_rng(seed)
    B, T, S, N, K, H, Hv = static["sizes"]

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    def by_axes(axes: int) -> tuple[int, ...]:
        return tuple(n if axes >> bit & 1 else 1 for bit, n in enumerate((B, N, T, S)))

    def lengths(size: int) -> jax.Array:
        return jnp.asarray(rng.integers(0, size + 1, B), jnp.int32)

    def segments(size: int) -> jax.Array:
        ids = np.sort(rng.integers(0, 4, (B, size)), axis=1)
        return jnp.asarray(np.where(ids == rng.integers(0, 6), -1, ids), jnp.int32)

    def positions(size: int) -> jax.Array:
        return jnp.asarray(np.sort(rng.integers(0, 40, (B, size)), axis=1), jnp.int32)

    bias = normal(*by_axes(static["bias_axes"]))
    makers = {
        "sinks": lambda: normal(N),
        "alibi_slopes": lambda: jnp.abs(normal(N)) * 0.2,
        "scale": lambda: jnp.float32(rng.choice([0.3, -0.5, 0.0])),
        "table": lambda: normal(N, 11),
        "bias": lambda: jnp.where(rng.random(bias.shape) < 0.15, -jnp.inf, bias),
        "mask": lambda: jnp.asarray(rng.random(by_axes(static["mask_axes"])) < 0.7),
        "dropout_rng": lambda: jax.random.key(seed),
        "query_seq_lengths": lambda: lengths(T),
        "key_value_seq_lengths": lambda: lengths(S),
        "query_segment_ids": lambda: segments(T),
        "key_value_segment_ids": lambda: segments(S),
        "query_positions": lambda: positions(T),
        "key_value_positions": lambda: positions(S),
    }
    made = {name: make() for name, make in makers.items() if name in static["arrays"]}
    floats = {"query": normal(B, T, N, H), "key": normal(B, S, K, H), "value": normal(B, S, K, Hv)}
    for name in ("sinks", "alibi_slopes", "scale", "table", "bias"):
        if name in made:
            floats[name] = made.pop(name)
    return floats, made


def poisoned(floats: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """The same with NaN in the queries, keys and values that lengths and padding hide."""
    hidden = {"query": jnp.bool_(False), "key": jnp.bool_(False)}
    for side, prefix in (("query", "query"), ("key", "key_value")):
        size = floats[side].shape[1]
        if f"{prefix}_seq_lengths" in others:
            hidden[side] |= jnp.arange(size) >= others[f"{prefix}_seq_lengths"][:, None]
        if f"{prefix}_segment_ids" in others:
            hidden[side] |= others[f"{prefix}_segment_ids"] < 0
    changed = dict(floats)
    for name, side in (("query", "query"), ("key", "key"), ("value", "key")):
        if hidden[side].ndim:
            changed[name] = jnp.where(hidden[side][:, :, None, None], jnp.nan, floats[name])
    return changed


# ---- outcomes ------------------------------------------------------------------------------------


def outcome_of(static: dict[str, Any], implementation: str) -> Any:
    """A function of (floats, others, weights) to output, LSE and gradients."""
    attention: Any = pallas_flash.dot_product_attention

    def loss(floats: dict[str, Any], others: dict[str, Any], weights: Any):
        arguments = {**floats, **others, **static["options"]}
        table = arguments.pop("table", None)
        if table is not None:
            arguments["score_mod"] = lambda score, b, n, i, j: (
                score * jnp.exp(table[0, 3]) + table[n, jnp.clip(i - j + 5, 0, 10)] * (b + 1)
            )
        out, lse = attention(**arguments, implementation=implementation, return_residual=True)
        finite = jnp.where(lse == -jnp.inf, 0, lse)
        return jnp.sum(out * weights[0]) + jnp.sum(finite * weights[1]), (out, lse)

    return jax.grad(loss, has_aux=True)


@functools.cache
def compiled(number: int, implementation: str) -> Any:
    return jax.jit(outcome_of(statics(number), implementation), compiler_options=QUICK)


def as_dict(results: Any) -> dict[str, np.ndarray]:
    grads, (out, lse) = results
    named = {"out": out, "lse": lse, **{f"d{name}": x for name, x in grads.items()}}
    return {name: np.asarray(x) for name, x in named.items()}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=settings().max_examples if NIGHTLY else 20)
@given(number=st.sampled_from(POOL), seed=st.integers(0, 2**16), poison=st.booleans())
def test_equals_the_float64_reference(implementation, number, seed, poison):
    static = statics(number)
    floats, others = draw(static, seed)
    B, T, _, N, _, _, Hv = static["sizes"]
    rng = np.random.default_rng(seed + 1)
    weights = (rng.standard_normal((B, T, N, Hv)), rng.standard_normal((B, T, N)))
    with jax.enable_x64(True):
        exact = {name: x.astype(jnp.float64) for name, x in floats.items()}
        want = as_dict(compiled(number, "reference")(exact, others, weights))
    weights = tuple(x.astype(np.float32) for x in weights)
    seen = poisoned(floats, others) if poison else floats
    got = as_dict(compiled(number, implementation)(seen, others, weights))
    assert_close(got, want, tolerance=5e-5)
