"""The online-softmax algebra, FlashAttention-1's loop and the traffic that it causes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_flash import flash1, online_softmax, tiles
from pallas_flash.online_softmax import State, empty, finalise, merge, update

QUERIES, VALUE_DIM = 3, 2


@st.composite
def states(draw) -> State:
    """The state of a few random keys, some hidden, some logits huge."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    keys = draw(st.integers(0, 4))
    logits = rng.standard_normal((QUERIES, 4)) * draw(st.sampled_from([1.0, 100.0]))
    logits[rng.random(logits.shape) < 0.3] = -np.inf
    logits[:, keys:] = -np.inf
    values = rng.standard_normal((4, VALUE_DIM))
    return update(
        empty((QUERIES,), VALUE_DIM),
        jnp.asarray(logits, jnp.float32),
        jnp.asarray(values, jnp.float32),
    )


def assert_same(a: State, b: State) -> None:
    for x, y in zip(finalise(a), finalise(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@given(states(), states(), states())
def test_merge_is_associative(a, b, c):
    assert_same(merge(merge(a, b), c), merge(a, merge(b, c)))


@given(states(), states())
def test_merge_is_order_free_and_has_an_identity(a, b):
    assert_same(merge(a, b), merge(b, a))
    assert_same(merge(a, empty((QUERIES,), VALUE_DIM)), a)


@given(seed=st.integers(0, 2**16), cut=st.integers(0, 7))
def test_any_split_of_the_keys_gives_softmax(seed, cut):
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(rng.standard_normal((QUERIES, 7)) * 30, jnp.float32)
    values = jnp.asarray(rng.standard_normal((7, VALUE_DIM)), jnp.float32)
    start = empty((QUERIES,), VALUE_DIM)
    state = start
    if cut > 0:
        state = update(state, logits[:, :cut], values[:cut])
    if cut < 7:
        state = update(state, logits[:, cut:], values[cut:])
    out, lse = finalise(state)
    np.testing.assert_allclose(out, jax.nn.softmax(logits) @ values, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, jax.nn.logsumexp(logits, axis=-1), rtol=1e-6)


@given(a=states(), b=states())
def test_finished_outputs_merge_by_lse(a, b):
    outs, lses = zip(finalise(a), finalise(b), strict=True)
    out, lse = online_softmax.merge_outputs(jnp.stack(outs), jnp.stack(lses))
    want_out, want_lse = finalise(merge(a, b))
    np.testing.assert_allclose(out, want_out, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5)


def test_nothing_visible_is_zero_and_nan_is_not_hidden():
    out, lse = finalise(empty((1,), 2))
    assert (out == 0).all()
    assert lse[0] == -jnp.inf
    out, lse = finalise(update(empty((1,), 1), jnp.array([[jnp.nan, 0.0]]), jnp.ones((2, 1))))
    assert jnp.isnan(out).all()
    assert jnp.isnan(lse).all()


# ---- FlashAttention-1 ---------------------------------------------------------------------------


@given(
    T=st.sampled_from([1, 12, 29]), S=st.sampled_from([1, 12, 29]), d=st.just(4),
    sram=st.sampled_from([64, 200]),
)  # fmt: skip
def test_double_loop_is_attention(T, S, d, sram):
    rng = np.random.default_rng([T, S, d])
    q, k, v = (jnp.asarray(rng.standard_normal((n, d)), jnp.float32) for n in (T, S, S))
    out, lse, _ = flash1.forward(q, k, v, sram)
    np.testing.assert_allclose(out, jax.nn.softmax(q @ k.T) @ v, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, jax.nn.logsumexp(q @ k.T, axis=-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("n", "d", "sram"), [(64, 8, 256), (60, 8, 1000), (33, 4, 100)])
def test_traffic_model_counts_what_the_loop_moves(n, d, sram):
    x = jnp.ones((n, d))
    *_, counted = flash1.forward(x, x, x, sram)
    assert counted == flash1.flash_traffic(n, d, sram)


def test_block_sizes_of_the_paper():
    assert tiles.from_sram(25_600, 64) == tiles.TileSizes(block_q=64, block_kv=100)
    assert tiles.from_sram(1000, 64) == tiles.TileSizes(block_q=4, block_kv=4)
    with pytest.raises(ValueError, match="sram_elements=255 cannot hold"):
        tiles.from_sram(255, 64)


def test_traffic_grows_as_the_papers_say():
    n, d, sram = 2**16, 64, 2**17
    flash = flash1.flash_traffic(n, d, sram).total
    # Theta(n^2 d^2 / M): four times for twice n, a half for twice M, four times for twice d.
    assert flash1.flash_traffic(2 * n, d, sram).total / flash == pytest.approx(4, rel=0.02)
    assert flash1.flash_traffic(n, d, 2 * sram).total / flash == pytest.approx(0.5, rel=0.02)
    assert flash1.flash_traffic(n, 2 * d, sram).total / flash == pytest.approx(4, rel=0.05)
    # Three elements per query and pass: q, o read, o written.
    assert flash == pytest.approx(12 * n**2 * d**2 / sram, rel=0.05)
    assert flash1.standard_traffic(n, d).total == pytest.approx(4 * n**2, rel=0.01)
    assert flash1.standard_traffic(n, d).total > 5 * flash
