"""The Hopper backward compiled on its GPU: `pytest -m gpu tests/gpu`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import api, reference, vjp
from pallas_flash.hopper import attention
from pallas_flash.hopper.backward import backward
from pallas_flash.hopper.backward_tiles import default_backward_tiles
from pallas_flash.shapes import Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU"),
]

CASES = (
    Case("plain-128", T=512, S=512, N=4, K=4, H=128),
    Case("causal-128", T=1024, S=1024, N=2, K=2, H=128, is_causal=True),
    Case("plain-64", T=512, S=512, N=4, K=4, H=64),
    Case("causal-64", B=2, T=1024, S=1024, N=2, K=2, H=64, is_causal=True),
    Case("plain-256", T=512, S=512, N=4, K=4, H=256),
    Case("causal-256", T=1024, S=1024, N=2, K=2, H=256, is_causal=True),
    Case("group-128", B=2, T=520, S=520, N=8, K=2, H=128, is_causal=True),
    Case("group-64", T=600, S=600, N=6, K=1, H=64, is_causal=True),
    Case("group-256", T=300, S=300, N=4, K=2, H=256, is_causal=True),
    Case("ragged-128", T=1003, S=997, N=2, K=1, H=128, is_causal=True),
    Case("tall-64", T=777, S=130, N=2, K=2, H=64, is_causal=True),
    Case("wide-128", T=130, S=1301, N=2, K=1, H=128),
    Case("one-query", T=1, S=300, N=2, K=2, H=64),
    Case("one-key", T=300, S=1, N=2, K=2, H=128),
    Case("window-64", T=1000, S=1000, N=2, K=2, H=64, is_causal=True, window=(100, 0)),
    Case("band-128", T=1000, S=1000, N=2, K=2, H=128, window=(70, 40)),
    Case("far-window-256", T=1024, S=1024, N=1, K=1, H=256, is_causal=True, window=(300, 0)),
    Case("lengths-128", B=3, T=600, S=700, N=2, K=2, H=128, q_lengths=True, kv_lengths=True),
    Case("lengths-64", B=3, T=600, S=600, N=2, K=1, H=64, is_causal=True, kv_lengths=True),
    Case("lengths-256", B=3, T=300, S=500, N=2, K=2, H=256, q_lengths=True, kv_lengths=True),
    Case("long-128", T=4096, S=4096, N=8, K=2, H=128, is_causal=True),
    Case("many-heads", B=40, T=130, S=130, N=40, K=40, H=64, is_causal=True),
)


def draw(case: Case, dtype=jnp.bfloat16):
    """Inputs, the other arguments, and the two cotangents."""
    rng = np.random.default_rng([1, *case.name.encode()])
    B, T, S, N, K, H, Hv = case.sizes
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, Hv), (B, T, N, Hv))
    *arrays, dout = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    dlse = jnp.asarray(rng.standard_normal((B, N, T)), jnp.float32)
    others = {"is_causal": case.is_causal, "local_window_size": case.window}
    lengths = {
        "query_seq_lengths": (case.q_lengths, T),
        "key_value_seq_lengths": (case.kv_lengths, S),
    }
    for name, (drawn, size) in lengths.items():
        if drawn:
            row = rng.integers(1, size + 1, B)
            row[0], row[-1] = size, 0
            others[name] = jnp.asarray(row, jnp.int32)
    return arrays, others, (dout, dlse)


def gradients(arrays, others, cotangents, implementation):
    """Gradients of q, k and v with cotangents for output and LSE."""

    @jax.jit
    def run(arrays, cotangents):
        def attend(*arrays):
            call = api.build_call(*arrays, **others)
            if implementation is reference:
                return reference.forward(call)
            return vjp.attention(implementation, call)

        result: Any = jax.vjp(attend, *arrays)
        (out, lse), pull_back = result
        dout, dlse = cotangents
        dlse = jnp.where(jnp.isfinite(lse), dlse, 0)
        return pull_back((dout.astype(out.dtype), dlse.astype(lse.dtype)))

    return run(arrays, cotangents)


def exact(arrays):
    return [x.astype(jnp.float32) for x in arrays]


def relative_error(got, want) -> float:
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    assert np.isfinite(got).all()
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_errors_are_those_of_bfloat16(case):
    arrays, others, cotangents = draw(case)
    want = gradients(exact(arrays), others, cotangents, reference)
    got = gradients(arrays, others, cotangents, attention)
    for name, g, w, like in zip("qkv", got, want, arrays, strict=True):
        assert g.dtype == like.dtype
        assert g.shape == like.shape
        assert relative_error(g, w) <= 6e-3, f"d{name} of {case.name}"


@pytest.mark.parametrize("H", [64, 128, 256])
def test_nothing_behind_a_length_leaks(H):
    case = Case(f"poison-{H}", B=3, T=500, S=600, N=2, K=2, H=H, q_lengths=True, kv_lengths=True)
    (q, k, v), others, (dout, dlse) = draw(case)
    q_hidden = jnp.arange(case.T) >= others["query_seq_lengths"][:, None]
    k_hidden = jnp.arange(case.S) >= others["key_value_seq_lengths"][:, None]

    def poison(x, hidden):
        return jnp.where(hidden[:, :, None, None], jnp.nan, x)

    poisoned = [poison(q, q_hidden), poison(k, k_hidden), poison(v, k_hidden)]
    clean = gradients([q, k, v], others, (dout, dlse), attention)
    got = gradients(poisoned, others, (poison(dout, q_hidden), dlse), attention)
    for g, w in zip(got, clean, strict=True):
        assert relative_error(g, w) < 1e-3  # atomic additions: not bit for bit


def packed_ids(case: Case, kind: str):
    """Segment ids of queries and keys: documents in order, in disorder, or with padding."""
    rng = np.random.default_rng(3)
    ids = np.sort(rng.integers(0, 5, (case.B, case.S)), axis=1)
    if kind == "disorder":
        ids = rng.integers(0, 3, (case.B, case.S))
    if kind == "padding":
        ids[:, -case.S // 5 :] = -1
    return jnp.asarray(ids[:, : case.T], jnp.int32), jnp.asarray(ids, jnp.int32)


FEATURES = {
    "documents": {"ids": "order"},
    "disorder": {"ids": "disorder"},
    "padding": {"ids": "padding", "sinks": True},
    "soft-cap": {"logits_soft_cap": 2.0},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "all": {"ids": "order", "logits_soft_cap": 2.0, "alibi": True, "sinks": True},
}


@pytest.mark.parametrize("H", [64, 128, 256])
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature, H):
    """Asked directly, from the reference's output and LSE: independent of the forward kernel."""
    case = Case(f"{feature}-{H}", B=2, T=712, S=712, N=4, K=2, H=H, is_causal=True)
    arrays, others, cotangents = draw(case)
    asked = dict(FEATURES[feature])
    kind = asked.pop("ids", None)
    if kind is not None:
        others["query_segment_ids"], others["key_value_segment_ids"] = packed_ids(case, kind)
    if asked.pop("alibi", False):
        others["alibi_slopes"] = jnp.asarray([0.5, 0.1, 0.02, 0.004])
    sinks = jnp.asarray([0.5, -1.0, 2.0, 0.0]) if asked.pop("sinks", False) else None
    call = api.build_call(*arrays, **others, **asked, sinks=sinks)

    @jax.jit
    def run(call, cotangents):
        exactly = dataclasses.replace(
            call, **dict(zip(("query", "key", "value"), exact(arrays), strict=True))
        )
        names = ["query", "key", "value"] + ([] if sinks is None else ["sinks"])

        def attend(*arrays):
            return reference.forward(
                dataclasses.replace(exactly, **dict(zip(names, arrays, strict=True)))
            )

        (out, lse), pull_back = jax.vjp(attend, *(getattr(exactly, name) for name in names))
        dout, dlse = cotangents
        dlse = jnp.where(jnp.isfinite(lse), dlse, 0)
        want = pull_back((dout.astype(out.dtype), dlse))
        rounded = out.astype(call.query.dtype)
        got = backward(call, rounded, lse, dout, dlse, default_backward_tiles(H))
        return [getattr(got, name) for name in names], want

    for name, g, w in zip(("q", "k", "v", "sinks"), *run(call, cotangents), strict=False):
        assert relative_error(g, w) <= 7e-3, f"d{name}"


def test_float16():
    arrays, others, cotangents = draw(
        Case("f16", T=300, S=300, N=2, K=2, H=128, is_causal=True), jnp.float16
    )
    want = gradients(exact(arrays), others, cotangents, reference)
    got = gradients(arrays, others, cotangents, attention)
    for g, w in zip(got, want, strict=True):
        assert relative_error(g, w) < 1e-3


def test_keys_and_values_repeat_bit_for_bit_and_queries_nearly():
    case = Case("repeat", B=2, T=2048, S=2048, N=4, K=4, H=128, is_causal=True)
    arrays, others, cotangents = draw(case)
    first = gradients(arrays, others, cotangents, attention)
    for _ in range(3):
        again = gradients(arrays, others, cotangents, attention)
        np.testing.assert_array_equal(np.asarray(first[1]), np.asarray(again[1]))
        np.testing.assert_array_equal(np.asarray(first[2]), np.asarray(again[2]))
        assert relative_error(again[0], first[0]) < 1e-4


ORDERED = (
    Case("repeat", B=2, T=2048, S=2048, N=4, K=4, H=128, is_causal=True),
    Case("repeat-full", T=1024, S=1408, N=4, K=2, H=128),
    Case("repeat-64", T=1003, S=1003, N=4, K=1, H=64, is_causal=True),
    Case("repeat-256", T=700, S=700, N=2, K=2, H=256, is_causal=True),
    Case("repeat-window", T=1500, S=1500, N=2, K=2, H=128, is_causal=True, window=(200, 0)),
    Case("repeat-lengths", B=3, T=600, S=700, N=2, K=2, H=128, q_lengths=True, kv_lengths=True),
)


@pytest.mark.parametrize("case", ORDERED, ids=lambda case: case.name)
def test_deterministic_gradients_repeat_bit_for_bit(case, monkeypatch):
    monkeypatch.setattr(attention, "WITHHELD", False)
    arrays, others, cotangents = draw(case)
    others["deterministic"] = True
    assert attention.backward_unsupported(api.build_call(*arrays, **others)) is None
    want = gradients(exact(arrays), others, cotangents, reference)
    first = gradients(arrays, others, cotangents, attention)
    for name, g, w in zip("qkv", first, want, strict=True):
        assert relative_error(g, w) <= 6e-3, f"d{name} of {case.name}"

    @jax.jit
    def same(arrays, cotangents):
        again = gradients(arrays, others, cotangents, attention)
        return jnp.stack([jnp.all(f == a) for f, a in zip(first, again, strict=True)])

    results = [same(arrays, cotangents) for _ in range(100)]
    assert bool(jnp.all(jnp.stack(results)))
