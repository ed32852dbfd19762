"""The Hopper forward compiled on its GPU: `pytest -m gpu tests/gpu`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_flash
from pallas_flash import api, reference, vjp
from pallas_flash.hopper import attention
from pallas_flash.hopper.forward import forward
from pallas_flash.hopper.tile_sizes import TUNED, ForwardTiles, default_forward_tiles
from pallas_flash.shapes import Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU"),
]

CASES = (
    Case("plain", T=512, S=512, N=4, K=4, H=128),
    Case("causal", T=1024, S=1024, N=4, K=2, H=128, is_causal=True),
    Case("ragged", T=1003, S=997, N=2, K=1, H=128, is_causal=True),
    Case("tall", T=777, S=130, N=2, K=2, H=64, is_causal=True),
    Case("wide", T=130, S=1304, N=2, K=1, H=64),
    Case("one-query", T=1, S=300, N=2, K=2, H=64),
    Case("window", T=1000, S=1000, N=2, K=2, H=64, is_causal=True, window=(100, 0)),
    Case("band", T=1000, S=1000, N=2, K=2, H=128, window=(70, 40)),
    Case("far-window", T=2048, S=2048, N=1, K=1, H=256, is_causal=True, window=(300, 0)),
    Case("d256", T=600, S=600, N=2, K=1, H=256, is_causal=True),
    Case("mla", T=520, S=520, N=2, K=2, H=192, Hv=128, is_causal=True),
    Case("lengths", B=3, T=600, S=700, N=2, K=2, H=128, q_lengths=True, kv_lengths=True),
    Case("lengths-causal", B=3, T=600, S=600, N=2, K=1, H=64, is_causal=True, kv_lengths=True),
    Case("lengths-256", B=3, T=300, S=500, N=2, K=2, H=256, kv_lengths=True),
    Case("long", B=1, T=4096, S=4096, N=8, K=2, H=128, is_causal=True),
    Case("long-64", B=1, T=4096, S=4096, N=8, K=8, H=64),
    Case("many-heads", B=40, T=130, S=130, N=40, K=40, H=64, is_causal=True),
)


def draw(case: Case, dtype=jnp.bfloat16):
    rng = np.random.default_rng([1, *case.name.encode()])
    B, T, S, N, K, H, Hv = case.sizes
    arrays = [
        jnp.asarray(rng.standard_normal(shape), dtype)
        for shape in ((B, T, N, H), (B, S, K, H), (B, S, K, Hv))
    ]
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
    return arrays, others


def attend(arrays, others, implementation):
    """Output and LSE; the kernel is asked directly, also for what `unsupported` withholds."""
    if implementation == "mosaic":
        return ask_kernel(arrays, others)

    def run(arrays):
        return pallas_flash.dot_product_attention(
            *arrays, **others, implementation=implementation, return_residual=True
        )

    return jax.jit(run)(arrays)


def ask_kernel(arrays, others, tiles: ForwardTiles | None = None):
    def run(arrays, traced):
        call = api.build_call(*arrays, **static, **traced)
        out, lse = attention.forward(call) if tiles is None else forward(call, tiles)
        return out, lse.transpose(0, 2, 1)

    static = {name: x for name, x in others.items() if not isinstance(x, jax.Array)}
    traced = {name: x for name, x in others.items() if isinstance(x, jax.Array)}
    return jax.jit(run)(arrays, traced)


def relative_error(got, want) -> float:
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    assert np.isfinite(got).all()
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def dense_bfloat16_error(case: Case) -> float:
    """Error of the textbook computation with its matrices in the input dtype."""
    arrays, others = draw(case)
    others = {name: x for name, x in others.items() if not name.endswith("lengths")}
    want, _ = attend([x.astype(jnp.float32) for x in arrays], others, "reference")
    _, T, S, N, K, H, _ = case.sizes
    q, k, v = arrays
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    logits = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32) * H**-0.5
    i, j = jnp.arange(T)[:, None], jnp.arange(S)
    seen = jnp.ones((T, S), bool)
    left, right = case.window or (None, None)
    if case.is_causal:
        right = 0
    if left is not None:
        seen &= j >= i - left
    if right is not None:
        seen &= j <= i + right
    p = jax.nn.softmax(jnp.where(seen, logits, -1e30), axis=-1).astype(q.dtype)
    out = jnp.einsum("bnts,bsnh->btnh", p, v)
    rows = np.asarray(seen.any(axis=-1))
    return relative_error(out[:, rows], np.asarray(want)[:, rows])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_errors_are_those_of_bfloat16(case):
    arrays, others = draw(case)
    want, want_lse = attend([x.astype(jnp.float32) for x in arrays], others, "reference")
    out, lse = attend(arrays, others, "mosaic")
    assert out.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    assert relative_error(out, want) <= 2 * dense_bfloat16_error(case)
    finite = np.isfinite(np.asarray(want_lse))
    assert (np.isfinite(np.asarray(lse)) == finite).all()
    np.testing.assert_allclose(
        np.asarray(lse)[finite], np.asarray(want_lse)[finite], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("H", [64, 128, 256])
def test_nothing_behind_a_length_leaks(H):
    case = Case(f"poison-{H}", B=3, T=500, S=600, N=2, K=2, H=H, q_lengths=True, kv_lengths=True)
    (q, k, v), others = draw(case)
    q_hidden = jnp.arange(case.T) >= others["query_seq_lengths"][:, None]
    k_hidden = jnp.arange(case.S) >= others["key_value_seq_lengths"][:, None]
    poisoned = [
        jnp.where(hidden[:, :, None, None], jnp.nan, x)
        for x, hidden in ((q, q_hidden), (k, k_hidden), (v, k_hidden))
    ]
    clean, poisoned = (attend(x, others, "mosaic") for x in ([q, k, v], poisoned))
    for got, want in zip(poisoned, clean, strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize("scale", [0.0, -0.4, 3.0])
def test_any_scale(scale):
    arrays, _ = draw(Case("scale", T=300, S=300, N=2, K=2, H=64))
    others = {"scale": scale}
    want, _ = attend([x.astype(jnp.float32) for x in arrays], others, "reference")
    out, _ = attend(arrays, others, "mosaic")
    assert relative_error(out, want) < 5e-3


def test_float16():
    arrays, others = draw(Case("f16", T=300, S=300, N=2, K=2, H=128), jnp.float16)
    want, _ = attend([x.astype(jnp.float32) for x in arrays], others, "reference")
    out, _ = attend(arrays, others, "mosaic")
    assert relative_error(out, want) < 1e-3


def test_gradients_flow_through_its_residuals():
    case = Case("grads", T=500, S=500, N=4, K=2, H=128, is_causal=True)
    arrays, others = draw(case)

    def loss(arrays, implementation):
        out = pallas_flash.dot_product_attention(*arrays, **others, implementation=implementation)
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    got = jax.jit(jax.grad(lambda a: loss(a, "mosaic")))(arrays)
    exact = [x.astype(jnp.float32) for x in arrays]
    want = jax.jit(jax.grad(lambda a: loss(a, "reference")))(exact)
    for g, w in zip(got, want, strict=True):
        assert relative_error(g, w) < 2e-2


def test_repeats_are_bitwise_equal():
    arrays, others = draw(Case("repeat", B=2, T=2048, S=2048, N=8, K=8, H=128, is_causal=True))
    first = np.asarray(attend(arrays, others, "mosaic")[0])
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(attend(arrays, others, "mosaic")[0]), first)


def packed(B: int, L: int, documents: int, padding: int = 0, seed: int = 0) -> jax.Array:
    """Ids of documents of random lengths, one behind the other, then padding."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(B):
        ends = np.sort(rng.choice(np.arange(1, L - padding), documents - 1, replace=False))
        ids = np.searchsorted(ends, np.arange(L), side="right")
        ids[L - padding :] = -1
        rows.append(ids)
    return jnp.asarray(np.stack(rows), jnp.int32)


def slopes(N: int) -> jax.Array:
    return jnp.asarray(2.0 ** -np.linspace(1, 8, N), jnp.float32)


def sinks(N: int) -> jax.Array:
    return jnp.linspace(-2.0, 6.0, N)


def segments(case: Case, **how) -> dict:
    return {
        "query_segment_ids": packed(case.B, case.T, **how),
        "key_value_segment_ids": packed(case.B, case.S, **how),
    }


def same_segments(case: Case, **how) -> dict:
    ids = packed(case.B, case.T, **how)
    return {"query_segment_ids": ids, "key_value_segment_ids": ids}


def shuffled_segments(case: Case) -> dict:
    rng = np.random.default_rng(3)
    ids = [jnp.asarray(rng.integers(-1, 4, (case.B, L)), jnp.int32) for L in (case.T, case.S)]
    return dict(zip(("query_segment_ids", "key_value_segment_ids"), ids, strict=True))


def with_features() -> dict:
    """Name -> (case, further arguments)."""
    a = Case("a", B=2, T=700, S=700, N=4, K=2, H=128, is_causal=True)
    b = Case("b", B=2, T=600, S=500, N=2, K=2, H=64)
    c = Case("c", B=2, T=520, S=520, N=2, K=1, H=256, is_causal=True)
    w = Case("w", B=2, T=1000, S=1000, N=2, K=2, H=64, is_causal=True, window=(150, 0))
    lengths = Case("l", B=3, T=500, S=600, N=2, K=2, H=128, q_lengths=True, kv_lengths=True)
    far = Case("f", B=1, T=4096, S=4096, N=2, K=2, H=128, is_causal=True)
    return {
        "cap": (a, {"logits_soft_cap": 5.0, "scale": 0.3}),
        "cap-negative-scale": (b, {"logits_soft_cap": 3.0, "scale": -0.3}),
        "sinks": (a, {"sinks": sinks(4)}),
        "sinks-lengths": (lengths, {"sinks": sinks(2)}),
        "alibi": (a, {"alibi_slopes": slopes(4)}),
        "alibi-full": (b, {"alibi_slopes": slopes(2)}),
        "alibi-cap-lengths": (lengths, {"alibi_slopes": slopes(2), "logits_soft_cap": 10.0}),
        "packed": (a, same_segments(a, documents=5)),
        "packed-256": (c, same_segments(c, documents=3, padding=9)),
        "packed-lengths": (lengths, segments(lengths, documents=3)),
        "packed-long": (far, same_segments(far, documents=9)),
        "shuffled-ids": (b, shuffled_segments(b)),
        "everything": (
            w,
            {
                **same_segments(w, documents=4, padding=30),
                "alibi_slopes": slopes(2),
                "sinks": sinks(2),
                "logits_soft_cap": 10.0,
            },
        ),
    }


def biased(shape, dtype=jnp.bfloat16, hidden: float = 0.1) -> dict:
    """Biases, a share of which is -inf; the first query, if there is one, sees nothing."""
    rng = np.random.default_rng([4, *shape])
    values = np.where(rng.random(shape) < hidden, -np.inf, rng.standard_normal(shape))
    if shape[2] > 1:
        values[:, :, 0] = -np.inf
    return {"bias": jnp.asarray(values, dtype)}


def with_bias() -> dict:
    """Name -> (case, further arguments): every form of a bias, and dense masks."""
    f32 = jnp.float32
    a = Case("ba", B=2, T=700, S=700, N=4, K=2, H=128, is_causal=True)
    b = Case("bb", B=2, T=512, S=640, N=2, K=2, H=128)
    c = Case("bc", B=2, T=600, S=500, N=2, K=2, H=64)
    d = Case("bd", B=2, T=520, S=576, N=2, K=1, H=256)
    w = Case("bw", B=1, T=1003, S=997, N=2, K=2, H=64, is_causal=True, window=(150, 0))
    m = Case("bm", B=2, T=300, S=320, N=2, K=1, H=192, Hv=128)
    lengths = Case("bl", B=3, T=500, S=600, N=2, K=2, H=128, q_lengths=True, kv_lengths=True)
    far = Case("bf", B=2, T=4096, S=4096, N=4, K=2, H=128)
    rng = np.random.default_rng(6)
    seen = jnp.asarray(rng.random((2, 1, 512, 640)) < 0.4)
    return {
        "bias-heads": (b, biased((1, 2, 512, 640))),
        "bias-float32": (b, biased((2, 1, 512, 640), f32)),
        "bias-causal": (a, biased((2, 4, 700, 700))),
        "bias-causal-float32": (a, biased((1, 4, 700, 700), f32)),
        "bias-64": (c, biased((2, 2, 600, 500))),
        "bias-64-float32": (c, biased((1, 1, 600, 500), f32)),
        "bias-256": (d, biased((1, 2, 520, 576))),
        "bias-256-float32": (d, biased((2, 2, 520, 576), f32)),
        "bias-mla-float16": (m, biased((1, 2, 300, 320), jnp.float16)),
        "bias-window": (w, biased((1, 2, 1003, 997))),
        "bias-lengths": (lengths, biased((3, 1, 500, 600))),
        "bias-long": (far, biased((1, 4, 4096, 4096))),
        "bias-cap": (b, {**biased((1, 2, 512, 640)), "logits_soft_cap": 3.0, "scale": -0.2}),
        "bias-keys": (b, biased((2, 1, 1, 640))),
        "bias-keys-causal": (a, {**biased((2, 1, 1, 700), f32), "sinks": sinks(4)}),
        "bias-keys-256": (d, biased((1, 2, 1, 576), hidden=0.97)),
        "bias-keys-lengths": (lengths, {**biased((3, 2, 1, 600)), "logits_soft_cap": 5.0}),
        "bias-rows": (a, biased((2, 4, 700, 1))),
        "bias-rows-64": (c, biased((1, 1, 600, 1), f32)),
        "bias-one": (b, biased((2, 2, 1, 1), hidden=0.0)),
        "dense": (b, {"mask": seen}),
        "dense-and-bias": (b, {"mask": seen, **biased((2, 1, 1, 640))}),
    }


FEATURES = with_features() | with_bias()
LESS_URGENT = ("cap", "sinks", "alibi", "alibi-cap-lengths", "packed-long")
LESS_URGENT += ("bias-rows-64", "bias-mla-float16", "bias-64-float32", "bias-keys-lengths")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in LESS_URGENT else [])
        for name in FEATURES
    ],
)
def test_semantics_have_the_errors_of_bfloat16(name):
    case, more = FEATURES[name]
    arrays, others = draw(case)
    others |= more
    want, want_lse = attend([x.astype(jnp.float32) for x in arrays], others, "reference")
    out, lse = ask_kernel(arrays, others)
    assert relative_error(out, want) < 6e-3
    want_lse, lse = np.asarray(want_lse), np.asarray(lse)
    finite = np.isfinite(want_lse)
    assert (np.isfinite(lse) == finite).all()
    # The soft cap's tanh is the hardware's: 2**-11 of the logit.
    close = 3e-3 if "logits_soft_cap" in others else 1e-3
    np.testing.assert_allclose(lse[finite], want_lse[finite], rtol=0, atol=close)


def test_gradients_with_a_bias_are_right():
    """Triton's backward makes them from this forward's output and LSE."""
    case = Case("bias-grads", T=300, S=320, N=4, K=2, H=128)
    arrays, _ = draw(case)
    bias = biased((1, 4, 300, 320))["bias"]

    def loss(operands, forward_of):
        *arrays, bias = operands
        call = api.build_call(*arrays, bias=bias)
        out, lse = forward_of(call)
        seen = jnp.where(jnp.isfinite(lse), lse, 0.0)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(seen)

    @jax.jit
    def got(operands):
        return jax.grad(lambda o: loss(o, lambda call: vjp.attention(attention, call)))(operands)

    exact = [x.astype(jnp.float32) for x in (*arrays, bias)]
    want = jax.jit(jax.grad(lambda o: loss(o, reference.forward)))(exact)
    for g, w in zip(got([*arrays, bias]), want, strict=True):
        assert relative_error(g, w) < 2e-2


@pytest.mark.parametrize("H", TUNED)
@pytest.mark.parametrize("growth", [pytest.param(0.5, marks=pytest.mark.slow), 40.0], ids=str)
def test_a_stale_maximum_changes_no_error(H, growth):
    """Logits that grow along the visited keys (last first): slowly, or past the threshold."""
    case = Case("stale", T=400, S=1100, N=2, K=2, H=H[0])
    (q, k, v), others = draw(case)
    ramp = 1 + growth * jnp.arange(case.S, 0, -1)[:, None, None] / case.S
    arrays = [q, (k * ramp).astype(k.dtype), v]
    tiles = dataclasses.replace(default_forward_tiles(*H), rescale_above=8.0)
    want, want_lse = attend([x.astype(jnp.float32) for x in arrays], others, "reference")
    out, lse = ask_kernel(arrays, others, tiles)
    assert relative_error(out, want) < 5e-3
    np.testing.assert_allclose(np.asarray(lse), np.asarray(want_lse), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "tiles",
    [
        ForwardTiles(keys=192, output_in_query=True, query_in_registers=False, cluster=2),
        ForwardTiles(keys=64, consumers=3, query_in_registers=False, cluster=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("case", [CASES[2]], ids=lambda c: c.name)
def test_other_tiles_give_the_same_answer(case, tiles):
    arrays, others = draw(case)
    want, _ = ask_kernel(arrays, others)
    out, _ = ask_kernel(arrays, others, tiles)
    assert relative_error(out, want) < 4e-3
