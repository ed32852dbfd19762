"""RoPE: phases against float64, the relative-position property, segment positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.rope import (
    apply_rotary,
    inverse_frequencies,
    positions_in_segments,
    rotary_phases,
    rotary_table,
)

HEAD_DIM = 64


def _turn_error(phases: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> float:
    """Largest distance on the circle from the float64 phase, in radians."""
    exact = positions[:, None].astype(np.float64) * frequencies
    difference = np.asarray(phases, np.float64) - exact
    return float(np.abs((difference + np.pi) % (2 * np.pi) - np.pi).max())


@pytest.mark.parametrize(("head_dim", "theta"), [(64, 1e4), (128, 5e5), (128, 1e6)])
def test_phase_error_to_131072_positions(head_dim: int, theta: float):
    positions = np.arange(131_073, dtype=np.int32)
    frequencies = inverse_frequencies(head_dim, theta)
    phases = rotary_phases(jnp.asarray(positions), frequencies)
    assert phases.dtype == jnp.float32
    assert float(jnp.abs(phases).max()) < 2 * np.pi
    assert _turn_error(np.asarray(phases), positions, frequencies) < 2e-6

    # The product in float32 is what this module is there to avoid; it fails the same test.
    plain = positions[:, None].astype(np.float32) * frequencies.astype(np.float32)
    assert _turn_error(plain, positions, frequencies) > 1e-3


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=8, max_size=8), st.floats(1.5, 1e7))
def test_phase_error_at_any_int32_position(positions: list[int], theta: float):
    positions_array = np.array(positions, np.int32)
    frequencies = inverse_frequencies(8, theta)
    phases = rotary_phases(jnp.asarray(positions_array), frequencies)
    assert _turn_error(np.asarray(phases), positions_array, frequencies) < 1e-5


def test_rotation_is_multiplication_of_complex_pairs():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 5, 3, HEAD_DIM)).astype(np.float32)
    positions = rng.integers(0, 10_000, (2, 5)).astype(np.int32)
    frequencies = inverse_frequencies(HEAD_DIM, 1e4)
    got = apply_rotary(jnp.asarray(x), rotary_table(jnp.asarray(positions), frequencies))
    pairs = x[..., : HEAD_DIM // 2] + 1j * x[..., HEAD_DIM // 2 :]
    pairs = pairs * np.exp(1j * positions[..., None, None] * frequencies)
    want = np.concatenate([pairs.real, pairs.imag], axis=-1)
    np.testing.assert_allclose(got, want, atol=2e-6)


@jax.jit
def _score(at_query, at_key):
    """Inner product of one fixed query and key, rotated to two positions."""
    query, key = np.random.default_rng(0).normal(size=(2, 1, 1, 1, HEAD_DIM)).astype(np.float32)
    frequencies = inverse_frequencies(HEAD_DIM, 1e4)
    tables = [rotary_table(jnp.array([[t]]), frequencies) for t in (at_query, at_key)]
    return jnp.vdot(
        apply_rotary(jnp.asarray(query), tables[0]), apply_rotary(jnp.asarray(key), tables[1])
    )


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2000), st.integers(0, 2000), st.integers(0, 100_000))
def test_inner_product_depends_on_the_distance_only(m: int, n: int, shift: int):
    assert float(_score(m + shift, n + shift)) == pytest.approx(float(_score(m, n)), abs=1e-4)


def test_rotation_keeps_dtype_and_length():
    x = jax.random.normal(jax.random.key(0), (1, 4, 2, HEAD_DIM), jnp.bfloat16)
    table = rotary_table(jnp.arange(4)[None], inverse_frequencies(HEAD_DIM, 1e4))
    assert table.cos.dtype == table.sin.dtype == jnp.float32
    turned = apply_rotary(x, table)
    assert turned.dtype == jnp.bfloat16
    before, after = (jnp.sum(jnp.square(y.astype(jnp.float32)), -1) for y in (x, turned))
    np.testing.assert_allclose(after, before, rtol=2e-2)


def test_factor_scales_cos_and_sin():
    positions, frequencies = jnp.arange(6)[None], inverse_frequencies(8, 1e4)
    plain = rotary_table(positions, frequencies)
    scaled = rotary_table(positions, frequencies, factor=1.25)
    np.testing.assert_allclose(scaled.cos, 1.25 * plain.cos, rtol=1e-6)
    np.testing.assert_allclose(scaled.sin, 1.25 * plain.sin, rtol=1e-6)


def test_float_positions_are_refused():
    with pytest.raises(TypeError, match="positions must be integers"):
        rotary_phases(jnp.arange(3.0), inverse_frequencies(8, 1e4))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=9, max_size=9))
def test_positions_in_segments_count_from_each_start(ids: list[int]):
    want = []
    for t, segment in enumerate(ids):
        want.append(want[-1] + 1 if t and ids[t - 1] == segment else 0)
    assert positions_in_segments(jnp.array([ids])).tolist() == [want]
