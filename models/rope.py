"""Rotary position embedding (RoPE), exact to 1e-6 rad at any position.

Su et al., "RoFormer" (arXiv:2104.09864), eq. 34, in the half-split layout of Hugging Face
checkpoints: dimension i of a head is paired with dimension i + H/2, and the pair is turned by

    phase(t, i) = t · ω_i,        ω_i = theta ** (-2 i / H),      i = 0 .. H/2 - 1.

Why not simply `t * ω` in float32: the phase reaches t itself (ω_0 = 1), and a float32 near 131,072
is 0.008 rad from its neighbour. Here ω_i is turned on the host into a 32-bit fraction of a
revolution, and `t · fraction` is taken in wrapping 32-bit integers: whole revolutions fall off
the top, for free and exactly, and sin and cos see a small argument.

A context extension (position interpolation, YaRN, ...) is other frequencies and a factor on cos and
sin: see `models.rope_scaling`. Where fewer than H dims are rotated (R of them, the first), H above
is R, and the rest of a head passes unchanged.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

_REVOLUTION = 2.0**32  # one full turn in the unit of the integer phase


class RotaryTable(NamedTuple):
    """cos and sin of every phase: float32, one row a token, a column for each rotated pair."""

    cos: Float[Array, "*B T H/2"]
    sin: Float[Array, "*B T H/2"]


def inverse_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """ω_i = theta ** (-2 i / H) in radians a token: float64 `[H/2]`, on the host.

    >>> inverse_frequencies(4, 10_000.0).tolist()
    [1.0, 0.01]
    """
    return theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def rotary_phases(
    positions: Int[Array, "*B T"], frequencies: np.ndarray
) -> Float[Array, "*B T H/2"]:
    """`positions · frequencies` in radians, less whole revolutions: float32 in (-2π, 2π).

    Args:
        positions: integer positions; any int32, negative ones too.
        frequencies: float64 `[H/2]` in radians a token.

    Raises:
        TypeError: positions are not integers.
    """
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(
            f"positions must be integers (a float16 or bfloat16 position is already rounded), "
            f"got dtype {positions.dtype}."
        )
    turns = np.asarray(frequencies, np.float64) / (2 * np.pi) * _REVOLUTION
    whole = np.rint(turns)
    # What rounding to 1/2**32 of a turn leaves over grows with t; it is below half a unit a token,
    # so float32 holds `t · rest` to far better than the result needs.
    rest = (turns - whole).astype(np.float32)
    step = np.mod(whole, _REVOLUTION).astype(np.uint64).astype(np.uint32)
    t = positions.astype(jnp.int32)[..., None]
    wrapped = jax.lax.bitcast_convert_type(t, jnp.uint32) * step
    signed = jax.lax.bitcast_convert_type(wrapped, jnp.int32).astype(jnp.float32)
    units = signed + t.astype(jnp.float32) * rest
    return units * np.float32(2 * np.pi / _REVOLUTION)


def rotary_table(
    positions: Int[Array, "*B T"], frequencies: np.ndarray, *, factor: float = 1.0
) -> RotaryTable:
    """cos and sin of the phases, times `factor` (the attention factor of YaRN and LongRoPE)."""
    phases = rotary_phases(positions, frequencies)
    return RotaryTable(jnp.cos(phases) * factor, jnp.sin(phases) * factor)


def apply_rotary(x: Float[Array, "B T N H"], table: RotaryTable) -> Float[Array, "B T N H"]:
    """Turns each head of `x` by its token's phases; computed in float32, returned in x's dtype.

    A table of R/2 < H/2 columns turns the first R dims of each head and leaves the others alone.
    """
    cos, sin = table.cos[..., None, :], table.sin[..., None, :]
    half = cos.shape[-1]
    first, second, rest = jnp.split(x, [half, 2 * half], axis=-1)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*(part.astype(x.dtype) for part in rotated), rest], axis=-1)


def positions_in_segments(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Each token's offset from the start of its run of equal segment ids.

    >>> positions_in_segments(jnp.array([[1, 1, 1, 2, 2, 0]])).tolist()
    [[0, 1, 2, 0, 1, 0]]
    """
    index = jnp.arange(segment_ids.shape[-1], dtype=jnp.int32)
    before = jnp.roll(segment_ids, 1, axis=-1)
    is_start = (segment_ids != before) | (index == 0)
    start = jax.lax.cummax(jnp.where(is_start, index, 0), axis=segment_ids.ndim - 1)
    return index - start
