"""Every argument beyond the plain call, against the reference, forward and all gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import IMPLEMENTATIONS, QUICK, assert_close, draw, value_and_grads

import pallas_flash
from pallas_flash import shapes

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Triton.*:DeprecationWarning"),
    pytest.mark.usefixtures("scan_in_several_tiles"),
]

CASE = shapes.Case("semantics", B=2, T=70, S=90, N=4, K=2, H=8)
attention: Any = pallas_flash.dot_product_attention


def packed(size: int, cuts: list[list[int]]) -> jax.Array:
    """Segment ids of documents that end at the cuts; what follows the last is padding."""
    ids = [np.searchsorted(row, np.arange(size), side="right") for row in cuts]
    return jnp.asarray([np.where(x < len(row), x, -1) for x, row in zip(ids, cuts, strict=True)])


def within_documents(ids: jax.Array) -> jax.Array:
    """Positions that start again at each document."""
    row = np.asarray(ids)
    starts = np.array([[np.flatnonzero(r == x)[0] for x in r] for r in row])
    return jnp.asarray(np.arange(row.shape[1]) - starts)


def bias_by_distance(table: jax.Array):
    return lambda score, b, n, i, j: score + table[n, jnp.clip(i - j + 5, 0, 10)] * (b + 1)


Q_IDS = packed(70, [[20, 45, 70], [33, 60]])
K_IDS = packed(90, [[25, 60, 80], [30, 88]])
FLOATS: dict[str, Any] = {
    "sinks": jnp.array([0.5, -1.0, 3.0, 0.0]),
    "alibi_slopes": jnp.array([0.5, 0.25, 0.1, 0.0]),
    "scale": jnp.float32(0.7),
    "table": jax.random.normal(jax.random.key(3), (4, 11)),
    "bias": jax.random.normal(jax.random.key(4), (2, 1, 1, 90)),
}
HALF_HIDDEN = jax.random.bernoulli(jax.random.key(5), 0.5, (1, 4, 70, 90))
TABLE = jax.random.bernoulli(jax.random.key(6), 0.6, (4, 90))
KEY = jax.random.key(7)


def every_third(b, n, i, j):
    return ((i // 8 + j // 8 + n) % 3 == 0) & TABLE[n, j]


# name: (differentiable extras, other arguments)
VARIANTS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "bottom-right": ([], {"is_causal": True, "causal_alignment": "bottom_right"}),
    "bottom-right-lengths": (
        ["alibi_slopes"],
        {"causal_alignment": "bottom_right", "local_window_size": (20, 3),
         "query_seq_lengths": jnp.array([70, 31]), "key_value_seq_lengths": jnp.array([50, 90])},
    ),
    "segments": (
        [], {"query_segment_ids": Q_IDS, "key_value_segment_ids": K_IDS},
    ),
    "packed-documents": (
        ["alibi_slopes"],
        {"query_segment_ids": Q_IDS, "key_value_segment_ids": K_IDS, "is_causal": True,
         "query_positions": within_documents(Q_IDS), "local_window_size": (15, None),
         "key_value_positions": within_documents(K_IDS)},
    ),
    "query-positions": (
        ["bias"],
        {"query_positions": jnp.stack([jnp.arange(70) + 20, jnp.arange(70)[::-1]]),
         "is_causal": True},
    ),
    "soft-cap": (["bias"], {"logits_soft_cap": 1.5, "is_causal": True}),
    "sinks": (["sinks"], {"local_window_size": (4, 0)}),
    "alibi": (["alibi_slopes"], {"is_causal": True}),
    "traced-scale": (["scale", "bias"], {"is_causal": True}),
    "dropout": ([], {"dropout_rate": 0.3, "dropout_rng": KEY}),
    "score-mod": (["table"], {"make_score_mod": bias_by_distance}),
    "mask-mod": ([], {"mask_mod": every_third}),
    "block-mask": (
        [],
        {"mask_mod": pallas_flash.block_mask(
            lambda b, n, i, j: (i // 16 == j // 16) | (j < 2),
            T=70, S=90, block_q=16, block_kv=32)},
    ),
    "everything": (
        ["sinks", "alibi_slopes", "scale", "table", "bias"],
        {"make_score_mod": bias_by_distance, "mask_mod": every_third, "logits_soft_cap": 4.0,
         "mask": HALF_HIDDEN, "is_causal": True, "query_segment_ids": Q_IDS,
         "key_value_segment_ids": K_IDS, "key_value_seq_lengths": jnp.array([90, 77]),
         "local_window_size": (40, 10), "dropout_rate": 0.2, "dropout_rng": KEY},
    ),
}  # fmt: skip


def problem(floats: list[str], others: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return {**draw(CASE)[0], **{name: FLOATS[name] for name in floats}}, others


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", VARIANTS)
def test_equals_reference(name, implementation):
    floats, others = VARIANTS[name]
    arrays, others = problem(floats, others)
    got = value_and_grads(arrays, others, implementation)
    assert_close(got, value_and_grads(arrays, others, "reference"), tolerance=5e-5)


# ---- the reference itself, against what the arguments say ----------------------------------------


def test_sinks_are_an_extra_key_without_a_value():
    arrays, _ = problem(["sinks"], {})
    q, k, v = (arrays[name] for name in ("query", "key", "value"))
    out, lse = attention(q, k, v, sinks=arrays["sinks"], return_residual=True)
    extra = jnp.zeros((2, 1, 2, 8))
    bias = jnp.zeros((2, 4, 1, 91)).at[:, :, :, 90].set(arrays["sinks"][:, None])
    want, want_lse = attention(
        q, *(jnp.concatenate([x, extra], 1) for x in (k, v)), bias, return_residual=True
    )
    np.testing.assert_allclose(out, want, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", *IMPLEMENTATIONS])
def test_a_row_with_only_a_sink_is_zero_and_its_lse_is_the_sink(implementation):
    arrays, _ = problem(["sinks"], {})
    nothing = jnp.zeros((1, 1, 70, 90), bool)
    got = value_and_grads(arrays, {"mask": nothing}, implementation)
    assert (got["out"] == 0).all()
    sinks = np.broadcast_to(arrays["sinks"], (2, 70, 4))
    np.testing.assert_allclose(got["lse"], sinks, atol=1e-6)
    assert (got["dquery"] == 0).all()
    # d lse / d sink = 1 here, so the sink collects the LSE's cotangents.
    assert (np.abs(got["dsinks"]) > 1e-3).all()


def test_alibi_is_a_bias_by_distance():
    arrays, _ = problem(["alibi_slopes"], {})
    distance = jnp.abs(jnp.arange(70)[:, None] - jnp.arange(90))
    bias = -arrays.pop("alibi_slopes")[:, None, None] * distance
    np.testing.assert_allclose(
        attention(**arrays, alibi_slopes=FLOATS["alibi_slopes"]),
        attention(**arrays, bias=bias),
        atol=1e-5,
    )


def test_order_is_bias_then_score_mod_then_cap_then_mask():
    arrays, _ = problem([], {})
    bias = jax.random.normal(jax.random.key(0), (70, 90))
    logits = jnp.einsum("btngh,bsnh->bngts", arrays["query"].reshape(2, 70, 2, 2, 8), arrays["key"])
    logits = 2 * jnp.tanh(((logits * 0.5 + bias) * 3) / 2).reshape(2, 4, 70, 90)
    _, lse = attention(
        **arrays, bias=bias, scale=0.5, score_mod=lambda s, *_: s * 3, logits_soft_cap=2.0,
        is_causal=True, return_residual=True,
    )  # fmt: skip
    logits = jnp.where(jnp.arange(90) <= jnp.arange(70)[:, None], logits, -jnp.inf)
    want = jax.nn.logsumexp(logits, axis=-1).swapaxes(1, 2)
    np.testing.assert_allclose(lse, want, atol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", *IMPLEMENTATIONS])
def test_masked_by_bias_stays_masked_under_the_cap(implementation):
    arrays, _ = problem([], {})
    bias = jnp.where(HALF_HIDDEN, 0.3, -jnp.inf)
    got = value_and_grads({**arrays, "bias": bias}, {"logits_soft_cap": 2.0}, implementation)
    want = value_and_grads(
        {**arrays, "bias": jnp.full_like(bias, 0.3)},
        {"logits_soft_cap": 2.0, "mask": HALF_HIDDEN},
        "reference",
    )
    assert_close(got, want)


@pytest.mark.parametrize("implementation", ["reference", *IMPLEMENTATIONS])
def test_packing_equals_separate_calls(implementation):
    case = shapes.Case("packing", B=1, T=90, S=90, N=4, K=2, H=8)
    arrays, _ = draw(case)
    cuts = [25, 60, 90]
    ids = packed(90, [cuts])
    options = {"is_causal": True, "local_window_size": (20, None)}
    whole = value_and_grads(
        arrays, {**options, "query_segment_ids": ids, "key_value_segment_ids": ids}, implementation
    )
    for start, end in zip([0, *cuts], cuts, strict=False):
        alone = {name: x[:, start:end] for name, x in arrays.items()}
        out, lse = attention(**alone, **options, return_residual=True)
        np.testing.assert_allclose(whole["out"][:, start:end], out, atol=2e-5)
        np.testing.assert_allclose(whole["lse"][:, start:end], lse, atol=2e-5)


@pytest.mark.parametrize("implementation", ["reference", *IMPLEMENTATIONS])
def test_gradients_of_packed_documents_are_those_of_separate_calls(implementation):
    case = shapes.Case("packing", B=1, T=90, S=90, N=4, K=2, H=8)
    arrays, _ = draw(case)
    qkv = [arrays[name] for name in ("query", "key", "value")]
    dout = jax.random.normal(KEY, arrays["query"].shape)
    cuts = [25, 60, 90]
    ids = packed(90, [cuts])

    def gradients(name, qkv, dout, ids=None):
        def attend(*qkv):
            return attention(
                *qkv, is_causal=True, local_window_size=(20, None), implementation=name,
                query_segment_ids=ids, key_value_segment_ids=ids,
            )  # fmt: skip

        return jax.vjp(attend, *qkv)[1](dout)

    run = jax.jit(functools.partial(gradients, implementation), compiler_options=QUICK)
    whole = run(qkv, dout, ids)
    for start, end in zip([0, *cuts], cuts, strict=False):
        document = slice(start, end)
        alone = gradients("reference", [x[:, document] for x in qkv], dout[:, document])
        for got, want in zip(whole, alone, strict=True):
            np.testing.assert_allclose(got[:, document], want, atol=5e-5)
    # A cotangent of the second document alone moves nothing of the others, not by one bit.
    inside = (jnp.arange(90) >= 25) & (jnp.arange(90) < 60)
    for gradient in run(qkv, jnp.where(inside[:, None, None], dout, 0), ids):
        assert (gradient[:, ~inside] == 0).all()
        assert (gradient[:, inside] != 0).any()


def test_dropout_keeps_the_right_share_and_the_expectation():
    query = jnp.zeros((1, 64, 2, 8))
    value = jnp.ones((1, 512, 2, 8))
    outs = attention(query, value, value, dropout_rate=0.25, dropout_rng=KEY)
    # Each output is the mean of 512 kept-or-dropped ones: standard error 0.025.
    assert jnp.abs(outs - 1).max() < 0.13
    assert jnp.abs(jnp.mean(outs) - 1) < 0.01
    assert jnp.std(outs[..., 0]) == pytest.approx((0.25 / 0.75 / 512) ** 0.5, rel=0.2)
    again = attention(query, value, value, dropout_rate=0.25, dropout_rng=KEY)
    np.testing.assert_array_equal(outs, again)
    other = attention(query, value, value, dropout_rate=0.25, dropout_rng=jax.random.key(8))
    assert (outs != other).mean() > 0.9


def test_block_mask_skips_empty_tiles():
    from pallas_flash.mask import Mask
    from pallas_flash.schedule import tile_map

    blocks = pallas_flash.block_mask(
        lambda b, n, i, j: i // 32 == j // 32, T=100, S=100, block_q=16, block_kv=16
    )
    mask = Mask(mask_mod=blocks.mod, blocks=blocks)
    np.testing.assert_array_equal(tile_map(mask, 1, 100, 100, (32, 32))[0], np.eye(4, dtype=bool))
    assert float(blocks.sparsity) == pytest.approx(1 - 13 / 49)


_choices = st.fixed_dictionaries(
    {},
    optional={
        name: st.just(value)
        for name, value in {
            "causal_alignment": "bottom_right",
            "logits_soft_cap": 3.0,
            "mask": HALF_HIDDEN,
            "mask_mod": every_third,
            "query_segment_ids": Q_IDS,
            "query_seq_lengths": jnp.array([70, 41]),
            "key_value_seq_lengths": jnp.array([30, 90]),
            "local_window_size": (30, 12),
            "dropout_rate": 0.2,
            "is_causal": True,
        }.items()
    },
)


@settings(max_examples=4 if settings().max_examples < 100 else settings().max_examples)
@given(others=_choices, floats=st.sets(st.sampled_from(sorted(FLOATS))), seed=st.integers(0, 99))
def test_any_combination_equals_the_float64_reference(others, floats, seed):
    others = dict(others)
    if "query_segment_ids" in others:
        others["key_value_segment_ids"] = K_IDS
    if "dropout_rate" in others:
        others["dropout_rng"] = KEY
    if "table" in floats:
        others["make_score_mod"] = bias_by_distance
    with jax.enable_x64(True):
        arrays = {**draw(CASE, seed)[0], **{name: FLOATS[name] for name in sorted(floats)}}
        exact = {name: x.astype(jnp.float64) for name, x in arrays.items()}
        want = value_and_grads(exact, others, "reference")
        assert_close(value_and_grads(exact, others, "xla"), want, tolerance=1e-11)
    assert_close(value_and_grads(arrays, others, "xla"), want, tolerance=3e-5)
