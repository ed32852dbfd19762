"""RoPE: phases against float64, the relative-position property, segment positions."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.decoder import config_rotary_table
from models.presets import llama3_8b
from models.rope import (
    apply_rotary,
    inverse_frequencies,
    positions_in_segments,
    rotary_phases,
    rotary_table,
)
from models.rope_scaling import RopeScaling, raised_theta, scaled_frequencies

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


SCALINGS = {
    "linear": RopeScaling(type="linear", factor=32.0),
    "ntk": RopeScaling(type="ntk", factor=32.0),
    "dynamic": RopeScaling(type="dynamic", factor=2.0, original_max_seq_len=4096),
    "yarn": RopeScaling(type="yarn", factor=32.0, original_max_seq_len=4096),
    "llama3": RopeScaling(
        type="llama3",
        factor=8.0,
        original_max_seq_len=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    ),
    "longrope": RopeScaling(
        type="longrope",
        factor=32.0,
        original_max_seq_len=4096,
        short_factor=tuple(np.linspace(1, 3, 64)),
        long_factor=tuple(np.geomspace(1, 60, 64)),
    ),
}
LONGEST = 131_072


def _by_definition(scaling: RopeScaling, theta: float, dims: int) -> list[float]:
    """Float64 frequencies at T = 131,072, pair by pair, from the formulas of the papers."""
    s, trained = scaling.factor or 1.0, scaling.original_max_seq_len or 0
    frequencies = []
    for i in range(dims // 2):
        plain = theta ** (-2 * i / dims)
        turns = trained * plain / (2 * math.pi)
        if scaling.type == "linear":
            w = plain / s
        elif scaling.type in ("ntk", "dynamic"):
            stretch = s if scaling.type == "ntk" else s * LONGEST / trained - (s - 1)
            w = (theta * stretch ** (dims / (dims - 2))) ** (-2 * i / dims)
        elif scaling.type == "yarn":
            # Dimensions at which a pair turns 32 times and once within the trained length.
            ends = [dims * math.log(trained / (b * 2 * math.pi)) / 2 for b in (32, 1)]
            low, high = (end / math.log(theta) for end in ends)
            ramp = (i - math.floor(low)) / (math.ceil(high) - math.floor(low))
            ramp = min(max(ramp, 0.0), 1.0)
            w = ramp * plain / s + (1 - ramp) * plain
        elif scaling.type == "llama3":
            if turns > 4:
                w = plain
            elif turns < 1:
                w = plain / s
            else:
                w = (turns - 1) / 3 * plain + (4 - turns) / 3 * plain / s
        else:
            assert scaling.long_factor is not None
            w = plain / scaling.long_factor[i]
        frequencies.append(w)
    return frequencies


@pytest.mark.parametrize("name", SCALINGS)
def test_phase_error_to_131072_positions_under_every_scaling(name: str):
    """The table that a bfloat16 model uses, against float64: a few roundings of float32."""
    scaling, theta, dims = SCALINGS[name], 500_000.0, 128
    config = dataclasses.replace(llama3_8b(), rope_scaling=scaling, max_seq_len=LONGEST)
    assert config.compute_dtype == "bfloat16"
    positions = np.concatenate([np.arange(0, LONGEST, 61), np.arange(LONGEST - 64, LONGEST)])
    table = config_rotary_table(config, jnp.asarray(positions)[None], seq_len=LONGEST)
    assert table.cos.dtype == table.sin.dtype == jnp.float32
    want = np.asarray(_by_definition(scaling, theta, dims))
    got = np.asarray(table.sin, np.float64), np.asarray(table.cos, np.float64)
    phases = np.arctan2(*got)[0]
    assert _turn_error(phases, positions, want) < 2e-6
    np.testing.assert_allclose(np.hypot(*got), scaling.cos_sin_factor, rtol=1e-6)


def test_frequencies_of_published_models():
    """Values of transformers' own functions executed in float64."""
    yarn = RopeScaling(type="yarn", factor=4.0, original_max_seq_len=32_768)
    got = scaled_frequencies(128, 1e6, yarn, seq_len=1)
    np.testing.assert_allclose(
        got[[23, 30, 39, 40, 63]],
        [0.0069783058, 0.001064361, 6.4903943e-5, 4.4456985e-5, 3.1023444e-7],
        rtol=1e-7,
    )
    got = scaled_frequencies(128, 5e5, SCALINGS["llama3"], seq_len=1)
    np.testing.assert_allclose(
        got[[28, 29, 30, 36]], [0.003211446, 0.0021665708, 0.0013718936, 7.7846553e-5], rtol=1e-7
    )
    dynamic = RopeScaling(type="dynamic", factor=1.0, original_max_seq_len=2048)
    raised = raised_theta(128, 1e4, dynamic, seq_len=8192)
    assert raised == pytest.approx(40_889.94, abs=0.01)
    assert raised_theta(128, 1e4, dynamic, seq_len=2048) == 1e4


def test_longrope_changes_lists_beyond_the_trained_length():
    scaling = SCALINGS["longrope"]
    plain = scaled_frequencies(128, 1e4, None, seq_len=1)
    np.testing.assert_array_equal(plain, inverse_frequencies(128, 1e4))
    for seq_len, divisors in ((4096, scaling.short_factor), (4097, scaling.long_factor)):
        got = scaled_frequencies(128, 1e4, scaling, seq_len=seq_len)
        np.testing.assert_allclose(got, plain / np.asarray(divisors), rtol=1e-12)
    want = math.sqrt(1 + math.log(32) / math.log(4096))
    assert scaling.cos_sin_factor == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"type": "alibi"}, ValueError, "rope type must be one of .*got 'alibi'"),
        ({"type": "linear"}, ValueError, "rope type 'linear' needs factor"),
        ({"type": "linear", "factor": 0.5}, ValueError, "factor must be at least 1, got 0.5"),
        ({"type": "linear", "factor": "8"}, TypeError, "factor must be a number"),
        ({"type": "linear", "factor": math.inf}, ValueError, "factor must be finite"),
        (
            {"type": "linear", "factor": 2.0, "original_max_seq_len": 8},
            ValueError,
            "original_max_seq_len=8 has no effect for rope type 'linear'",
        ),
        (
            {"type": "yarn", "factor": 2.0, "original_max_seq_len": 8, "beta_slow": 40.0},
            ValueError,
            "beta_slow=40.0 must be below beta_fast=32.0",
        ),
        (
            {"type": "yarn", "factor": 2.0, "original_max_seq_len": 8.5},
            TypeError,
            "original_max_seq_len must be a number",
        ),
        (
            {
                "type": "longrope",
                "original_max_seq_len": 8,
                "short_factor": [1.0, 0.0],
                "long_factor": [1.0, 1.0],
            },
            ValueError,
            "short_factor must hold finite numbers above 0",
        ),
    ],
)
def test_bad_scaling_is_named(fields: dict, error, message: str):
    with pytest.raises(error, match=message):
        RopeScaling(**fields)


def test_divisors_must_fit_the_rotated_dims():
    with pytest.raises(ValueError, match=r"short_factor has 64 entries, but 64 rotated dims have"):
        scaled_frequencies(64, 1e4, SCALINGS["longrope"], seq_len=1)


def test_partial_table_leaves_the_other_dims_alone():
    x = jax.random.normal(jax.random.key(0), (1, 4, 2, HEAD_DIM))
    table = rotary_table(jnp.arange(4)[None], inverse_frequencies(48, 1e4))
    turned = apply_rotary(x, table)
    np.testing.assert_array_equal(turned[..., 48:], x[..., 48:])
    np.testing.assert_array_equal(turned[..., :48], apply_rotary(x[..., :48], table))


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
