"""From raw scores to logits: what a call does to a tile of scale * q k^T, element by element.

The order is fixed: scale, bias, ALiBi, `score_mod`, soft cap, mask. `logits` is one differentiable
function of the scores and of everything that enters them, so a backward pass takes its `jax.vjp`
on the tile instead of repeating the chain rule by hand.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_flash.mask import Mask


class Settings(Protocol):
    """What the logits need of an `AttentionCall`."""

    @property
    def mask(self) -> Mask: ...

    @property
    def soft_cap(self) -> float | None: ...


class Terms(NamedTuple):
    """The differentiable operands of the logits, one tile's worth; any may be None."""

    bias: Float[Array, "#B #N #q #k"] | None = None
    alibi_slopes: Float[Array, "N 1 1"] | None = None
    score_mod: Any = None  # a `Mod`, or what stands for one in a kernel: it has `on_tile`


@dataclasses.dataclass(frozen=True)
class Tile:
    """Where a tile lies, as integer arrays that broadcast to (B, N, q, k).

    Attributes:
      batch, head, q_index, k_index: coordinates in the whole call.
      q_length, kv_length: lengths of the batch rows.
      q_segment, kv_segment, q_position, kv_position: the tile's parts of the mask's arrays, or
        None where the mask has none.
      dense: the tile's part of the dense mask, or None.
      active: False for batch rows that have run out of tiles, or None.
    """

    batch: Any
    head: Any
    q_index: Any
    k_index: Any
    q_length: Any
    kv_length: Any
    q_segment: Any = None
    kv_segment: Any = None
    q_position: Any = None
    kv_position: Any = None
    dense: Any = None
    active: Any = None


def visible(mask: Mask, tile: Tile) -> Bool[Array, "#B #N q k"]:
    """Which elements of the tile the mask shows."""
    shown = tile.dense
    if mask.mask_mod is not None:
        allowed = mask.mask_mod.on_tile(tile.batch, tile.head, tile.q_index, tile.k_index)
        shown = allowed if shown is None else shown & allowed
    seen = mask.visible(
        tile.q_index,
        tile.k_index,
        q_length=tile.q_length,
        kv_length=tile.kv_length,
        q_segment=tile.q_segment,
        kv_segment=tile.kv_segment,
        q_position=tile.q_position,
        kv_position=tile.kv_position,
        dense=shown,
    )
    return seen if tile.active is None else seen & tile.active


def logits(
    scores: Float[Array, "B N q k"],
    terms: Terms,
    seen: Bool[Array, "#B #N q k"],
    call: Settings,
    tile: Tile,
) -> tuple[Float[Array, "B N q k"], Bool[Array, "#B #N q k"]]:
    """Logits of a tile, and which of its elements count.

    Hidden elements come back as an arbitrary finite number, not as -inf, and their gradient is
    exactly 0 whatever the operands hold there: the caller multiplies by the second result.

    Args:
      scores: scale * q k^T, float32 or float64.
      terms: bias, slopes and score_mod, of the tile.
      seen: the mask on this tile.
      call: the static rest (soft cap, mask alignment).
      tile: coordinates.
    """
    if terms.bias is not None:
        # Minus infinity means masked, here and now: the soft cap must not bring it back.
        bias = terms.bias.astype(scores.dtype)
        seen = seen & (bias != -jnp.inf)
        scores = scores + jnp.where(seen, bias, 0)
    if terms.alibi_slopes is not None:
        q_place, k_place = call.mask.places(
            tile.q_index,
            tile.k_index,
            tile.q_length,
            tile.kv_length,
            tile.q_position,
            tile.kv_position,
        )
        distance = jnp.abs(q_place - k_place).astype(scores.dtype)
        scores = scores - terms.alibi_slopes.astype(scores.dtype) * distance
    if terms.score_mod is not None:
        # Arbitrary functions see finite scores only, so that hidden NaNs stay hidden.
        scores = jnp.where(seen, scores, 0)
        scores = terms.score_mod.on_tile(
            scores, tile.batch, tile.head, tile.q_index, tile.k_index
        ).astype(scores.dtype)
        seen = seen & (scores != -jnp.inf)
    scores = jnp.where(seen, scores, 0)
    if call.soft_cap is not None:
        scores = call.soft_cap * jnp.tanh(scores / call.soft_cap)
    return scores, seen
