"""The shared suite: every implementation means what the reference means, forward and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import IMPLEMENTATIONS, QUICK, assert_close, draw, value_and_grads

import pallas_flash
from pallas_flash import shapes, tiles

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Triton.*:DeprecationWarning"),
    pytest.mark.usefixtures("scan_in_several_tiles"),
]
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@every_implementation
@pytest.mark.parametrize("case", shapes.SMALL, ids=lambda case: case.name)
def test_equals_reference(case, implementation):
    assert_close(value_and_grads(*draw(case), implementation), reference_of(case))


@functools.cache
def reference_of(case: shapes.Case) -> dict[str, np.ndarray]:
    return value_and_grads(*draw(case), "reference")


@every_implementation
def test_bfloat16_is_as_close_as_its_rounding(implementation):
    case = shapes.BY_NAME["grouped"]
    arrays, others = draw(case, dtype=jnp.bfloat16)
    exact = {name: x.astype(jnp.float32) for name, x in arrays.items()}
    want = value_and_grads(exact, others, "reference")
    got = value_and_grads(arrays, others, implementation)
    assert_close(got, want, tolerance=2e-2)
    assert_close({"lse": got["lse"]}, {"lse": want["lse"]}, tolerance=1e-3)


@every_implementation
def test_float32_bias_beside_bfloat16_inputs(implementation):
    case = shapes.BY_NAME["bias-heads"]
    arrays, others = draw(case, dtype=jnp.bfloat16)
    arrays["bias"] = draw(case)[0]["bias"]
    exact = {name: x.astype(jnp.float32) for name, x in arrays.items()}
    got = value_and_grads(arrays, others, implementation)
    assert_close(got, value_and_grads(exact, others, "reference"), tolerance=2e-2)


@every_implementation
def test_nothing_behind_a_length_leaks(implementation):
    case = shapes.BY_NAME["lengths-causal"]
    arrays, others = draw(case)
    want = value_and_grads(arrays, others, "reference")
    q_hidden = np.arange(case.T) >= np.asarray(others["query_seq_lengths"])[:, None]
    k_hidden = np.arange(case.S) >= np.asarray(others["key_value_seq_lengths"])[:, None]
    poisoned = {
        name: jnp.where((q_hidden if name == "query" else k_hidden)[:, :, None, None], jnp.nan, x)
        for name, x in arrays.items()
    }
    for name in ("reference", implementation):
        assert_close(value_and_grads(poisoned, others, name), want)


@every_implementation
def test_a_query_that_sees_nothing_has_zero_output_and_gradient(implementation):
    arrays, _ = draw(shapes.BY_NAME["plain"])
    mask = jnp.ones((1, 1, 64, 64), bool).at[:, :, 5].set(False)
    got = value_and_grads(arrays, {"mask": mask}, implementation)
    assert (got["out"][:, 5] == 0).all()
    assert (got["lse"][:, 5] == -np.inf).all()
    assert (got["dquery"][:, 5] == 0).all()
    assert not any(np.isnan(x).any() for x in got.values())


@every_implementation
def test_minus_infinity_in_the_bias_masks(implementation):
    arrays, _ = draw(shapes.BY_NAME["bias-full"])
    hidden = jax.random.bernoulli(jax.random.key(0), 0.4, arrays["bias"].shape)
    hidden = hidden.at[0, 0, 3].set(True)
    masked = {**arrays, "bias": jnp.where(hidden, -jnp.inf, arrays["bias"])}
    want = value_and_grads(arrays, {"mask": ~hidden}, "reference")
    assert_close(value_and_grads(masked, {}, implementation), want)


@every_implementation
def test_causality_by_gradient(implementation):
    arrays, _ = draw(shapes.BY_NAME["causal"])

    def out_at(key, value, t):
        out = pallas_flash.dot_product_attention(
            arrays["query"], key, value, is_causal=True, implementation=implementation
        )
        return jnp.sum(out[:, t])

    for t in (0, 63, 64, 100):
        for gradient in jax.jit(jax.grad(out_at, (0, 1)), static_argnums=2)(
            arrays["key"], arrays["value"], t
        ):
            assert (gradient[:, t + 1 :] == 0).all()
            assert (gradient[:, : t + 1] != 0).any()


@every_implementation
def test_shifting_all_logits_changes_nothing_but_the_lse(implementation):
    arrays, _ = draw(shapes.BY_NAME["plain"])
    shifted = {**arrays, "bias": jnp.full((1, 1, 1, 1), 50.0)}
    want = value_and_grads({**arrays, "bias": jnp.zeros((1, 1, 1, 1))}, {}, implementation)
    got = value_and_grads(shifted, {}, implementation)
    want["lse"] = want["lse"] + 50
    assert_close(got, want, tolerance=1e-4)


@every_implementation
def test_permuting_keys_with_values_changes_nothing(implementation):
    arrays, _ = draw(shapes.BY_NAME["multi-query"])
    order = jax.random.permutation(jax.random.key(0), arrays["key"].shape[1])
    permuted = {**arrays, "key": arrays["key"][:, order], "value": arrays["value"][:, order]}
    want = value_and_grads(arrays, {}, implementation)
    got = value_and_grads(permuted, {}, implementation)
    want["dkey"], want["dvalue"] = want["dkey"][:, order], want["dvalue"][:, order]
    assert_close(got, want)


@every_implementation
def test_without_a_batch_axis(implementation):
    arrays, _ = draw(shapes.BY_NAME["odd-primes"])
    single = [arrays[name][0] for name in ("query", "key", "value")]
    out, lse = pallas_flash.dot_product_attention(
        *single, implementation=implementation, return_residual=True
    )
    want = value_and_grads(arrays, {}, "reference")
    np.testing.assert_allclose(out, want["out"][0], atol=2e-5)
    np.testing.assert_allclose(lse, want["lse"][0], atol=2e-5)


@every_implementation
@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_scale_may_be_zero_or_negative(implementation, scale):
    arrays, _ = draw(shapes.BY_NAME["plain"])
    want = value_and_grads(arrays, {"scale": scale}, "reference")
    assert_close(value_and_grads(arrays, {"scale": scale}, implementation), want)


# One set of sizes for all draws: compilation, not arithmetic, is what an example costs.
_sizes = st.sampled_from([(1, 40, 70, 2, 1, 8), (2, 70, 40, 4, 2, 16), (2, 65, 65, 2, 2, 8)])
_window = st.none() | st.tuples(st.none() | st.integers(0, 50), st.none() | st.integers(0, 50))
_axes = st.none() | st.sets(st.sampled_from("BNTS")).map("".join)


@st.composite
def cases(draw_from) -> shapes.Case:
    B, T, S, N, K, H = draw_from(_sizes)
    return shapes.Case(
        "drawn", B, T, S, N, K, H,
        is_causal=draw_from(st.booleans()),
        window=draw_from(_window),
        q_lengths=draw_from(st.booleans()),
        kv_lengths=draw_from(st.booleans()),
        bias=draw_from(_axes),
        dense=draw_from(_axes),
    )  # fmt: skip


@every_implementation
@settings(max_examples=5 if settings().max_examples < 100 else settings().max_examples)
@given(case=cases(), seed=st.integers(0, 2**16))
def test_any_combination_equals_reference(implementation, case, seed):
    arrays, others = problems.draw(case, seed)
    want = value_and_grads(arrays, others, "reference")
    assert_close(value_and_grads(arrays, others, implementation), want)


@pytest.mark.parametrize("case", shapes.SMALL, ids=lambda case: case.name)
def test_reference_equals_jax_nn(case):
    if case.Hv or case.name in ("mask-full", "lengths-causal", "kv-lengths"):
        pytest.skip("jax.nn has no value head dim, and gives mean(V) to queries that see nothing")
    if case.bias == "T":
        pytest.skip("covered by the fuller patterns")
    arrays, others = draw(case)
    window = others["local_window_size"]
    if window is not None:
        others["local_window_size"] = tuple(10**6 if side is None else side for side in window)

    def run(arrays, attention):
        out = attention(**arrays, **others)
        return jnp.sum(out * jnp.sin(jnp.arange(out.size).reshape(out.shape)))

    results = []
    for attention in (
        lambda **kwargs: jax.nn.dot_product_attention(**kwargs, implementation="xla"),
        lambda **kwargs: pallas_flash.dot_product_attention(**kwargs, implementation="reference"),
    ):
        compiled = jax.jit(jax.value_and_grad(run), static_argnums=1, compiler_options=QUICK)
        value, grads = compiled(arrays, attention)
        results.append({"value": np.asarray(value), **jax.tree.map(np.asarray, grads)})
    assert_close(results[1], results[0], tolerance=1e-4)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_float64_is_float64(implementation):
    case = shapes.BY_NAME["lengths-causal"]
    with jax.enable_x64(True):
        arrays, others = draw(case, dtype=jnp.float64)
        exact = value_and_grads(arrays, others, "reference")
        single = {name: x.astype(jnp.float32) for name, x in arrays.items()}
        if implementation == "xla":
            assert_close(value_and_grads(arrays, others, "xla"), exact, tolerance=1e-12)
        assert_close(value_and_grads(single, others, implementation), exact, tolerance=1e-5)


@pytest.mark.parametrize("blocks", [(150, 170), (32, 170), (150, 17), (64, 32)], ids=str)
def test_tile_sizes_change_nothing(monkeypatch, blocks):
    case = shapes.Case(
        "tiles", T=150, S=170, N=4, K=2, is_causal=True, window=(90, 0), bias="NTS", kv_lengths=True
    )
    arrays, others = draw(case)
    monkeypatch.setattr(tiles, "for_scan", lambda *_: tiles.TileSizes(*blocks))
    assert_close(
        value_and_grads(arrays, others, "xla"), value_and_grads(arrays, others, "reference")
    )
