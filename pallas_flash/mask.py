"""One value object for every mask, which answers per tile: empty, full or partial.

Visibility is a predicate over (query i, key j) of one batch row. Causal, window and lengths
give each query one interval of keys,

    i + offset - left <= j <= i + offset + right,   0 <= j < S_b,   0 <= i < T_b,

with ``offset = 0`` (top left) or ``S_b - T_b`` (bottom right), so a rectangle of queries and keys
is classified from its corners alone::

              keys ->                    for the query tile marked *
      . # # . . . . . . . . .
    * . x # # x . . . . . . .     lo       first key that any of the tile's queries sees
    * . . x # # x . . . . . .     full_lo  first key that all of them see
      . . . . # # # . . . . .     full_hi  one past the last key that all of them see
                                  hi       one past the last key that any of them sees

Keys outside [lo, hi) are skipped, those in [full_lo, full_hi) need no masking code, and only the
rest is masked element by element with `Mask.visible`. Segment ids, positions, dense masks and
mask functions are not intervals of indices: for them the full range is empty, `Mask.visible` does
the masking, and `pallas_flash.schedule` finds the tiles that can be skipped.

The methods hold no batch dimension: a Pallas kernel calls them with scalars loaded from its refs,
a scan with slices, a test with integers.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_flash.block_mask import BlockMask
from pallas_flash.mods import Mod

if TYPE_CHECKING:  # a type checker takes a one-letter shape string for a variable
    PerRow = Array
else:
    PerRow = Int[Array, "B"]

Alignment = Literal["top_left", "bottom_right"]
Index = Any
"""A Python int, a traced integer scalar or an integer array: bounds work on all three."""


class Bounds(NamedTuple):
    """Half-open ranges of indices around one tile, with lo <= full_lo <= full_hi <= hi."""

    lo: Index
    full_lo: Index
    full_hi: Index
    hi: Index

    def in_tiles(self, block: int) -> Bounds:
        """The same ranges as tile numbers: any overlap is visited, only whole tiles are full.

        >>> Bounds(3, 5, 21, 23).in_tiles(4)
        Bounds(lo=0, full_lo=2, full_hi=5, hi=6)
        """
        lo, hi = self.lo // block, _ceil_div(self.hi, block)
        # An empty range [x, x) in the middle of a tile must not visit that tile.
        hi = _where(self.hi > self.lo, hi, lo)
        full_lo = _clip(_ceil_div(self.full_lo, block), lo, hi)
        full_hi = _clip(self.full_hi // block, full_lo, hi)
        return Bounds(lo, full_lo, full_hi, hi)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mask:
    """Which keys each query sees: the conjunction of all its fields.

    A JAX pytree: arrays are leaves, the rest is static (so it is part of a compiled function's
    identity). `Mask()` hides nothing.

    Attributes:
      is_causal: hide the keys after each query.
      window: (left, right) numbers of keys visible on either side of the query; None is unbounded.
      causal_alignment: which diagonal `is_causal` and `window` follow. "top_left": query i stands
        at key i. "bottom_right": query i stands at key i + S_b - T_b, with S_b and T_b the lengths
        of that batch row.
      query_lengths: int32 (B,); queries from T_b on see nothing.
      key_value_lengths: int32 (B,); keys from S_b on are seen by nobody, and their memory may hold
        anything, NaN included.
      query_segment_ids, key_value_segment_ids: int32 (B, T) and (B, S), both or neither; a query
        sees keys of its own segment only, and a negative id is padding.
      query_positions, key_value_positions: int32 (B, T) and (B, S); causal and window compare
        these instead of indices. Either may be given alone.
      dense: bool (B|1, N|1, T|1, S|1), True is visible.
      mask_mod: a traced user function (b, n, q_index, k_index) -> bool.
      blocks: what `mask_mod` shows of each block, when the user made a block mask; only a help to
        skip tiles, `mask_mod` alone decides.
    """

    is_causal: bool = dataclasses.field(default=False, metadata={"static": True})
    window: tuple[int | None, int | None] = dataclasses.field(
        default=(None, None), metadata={"static": True}
    )
    causal_alignment: Alignment = dataclasses.field(default="top_left", metadata={"static": True})
    query_lengths: PerRow | None = None
    key_value_lengths: PerRow | None = None
    query_segment_ids: Int[Array, "B T"] | None = None
    key_value_segment_ids: Int[Array, "B S"] | None = None
    query_positions: Int[Array, "B T"] | None = None
    key_value_positions: Int[Array, "B S"] | None = None
    dense: Bool[Array, "#B #N #T #S"] | None = None
    mask_mod: Mod | None = None
    blocks: BlockMask | None = None

    # ---- what kind of mask it is (static) -----------------------------------------------------

    @property
    def left(self) -> int | None:
        """Keys visible before the query's own place; None is all of them."""
        return self.window[0]

    @property
    def right(self) -> int | None:
        """Keys visible after the query's own place; causal is a right side of at most 0."""
        right = self.window[1]
        if not self.is_causal:
            return right
        return 0 if right is None else min(right, 0)

    @property
    def has_diagonal(self) -> bool:
        """True when visibility depends on where the query stands (causal or window)."""
        return self.left is not None or self.right is not None

    @property
    def has_positions(self) -> bool:
        return self.query_positions is not None or self.key_value_positions is not None

    @property
    def segments(self) -> tuple[Array, Array] | None:
        """Segment ids of queries and keys, None without segments."""
        if self.query_segment_ids is None or self.key_value_segment_ids is None:
            return None
        return self.query_segment_ids, self.key_value_segment_ids

    @property
    def has_segments(self) -> bool:
        return self.segments is not None

    @property
    def has_lengths(self) -> bool:
        return self.query_lengths is not None or self.key_value_lengths is not None

    @property
    def is_interval(self) -> bool:
        """True when `kv_bounds` alone describes the mask: causal, window and lengths by index."""
        by_position = self.has_positions and self.has_diagonal
        return not (
            by_position or self.has_segments or self.dense is not None or self.mask_mod is not None
        )

    @property
    def is_trivial(self) -> bool:
        """True when everything is visible."""
        return self.is_interval and not self.has_diagonal and not self.has_lengths

    # ---- lengths of a batch row ---------------------------------------------------------------

    def offset(self, q_length: Index, kv_length: Index) -> Index:
        """How many keys the diagonal is moved right: query i stands at key i + offset."""
        return kv_length - q_length if self.causal_alignment == "bottom_right" else 0

    def real_queries(self, batch: int, queries: int) -> Bool[Array, "B T"] | None:
        """False for queries behind a length or in padding; None when every query is real."""
        real = None
        if self.query_lengths is not None:
            lengths = row_lengths(self.query_lengths, batch, queries)
            real = jnp.arange(queries) < lengths[:, None]
        if self.query_segment_ids is not None:
            inside = self.query_segment_ids >= 0
            real = inside if real is None else real & inside
        return real

    # ---- tiles, for masks that are intervals ----------------------------------------------------

    def kv_bounds(
        self, q_start: Index, q_size: int, *, q_length: Index, kv_length: Index
    ) -> Bounds:
        """Keys to visit for the queries [q_start, q_start + q_size).

        Causal, window and lengths decide; other fields only make the full range empty (and
        positions widen [lo, hi) to every key, because an index then says nothing).

        Args:
          q_start: first query of the tile; int, traced scalar or array.
          q_size: number of queries in the tile.
          q_length: T_b, number of queries of this batch row (at most T).
          kv_length: S_b, number of keys of this batch row (at most S).

        >>> Mask(is_causal=True).kv_bounds(4, 4, q_length=16, kv_length=16)
        Bounds(lo=0, full_lo=0, full_hi=5, hi=8)
        >>> Mask(is_causal=True, window=(2, 0)).kv_bounds(8, 4, q_length=16, kv_length=16)
        Bounds(lo=6, full_lo=9, full_hi=9, hi=12)
        """
        offset = self.offset(q_length, kv_length)
        return self._bounds(
            q_start, q_size, q_length, kv_length, before=self.left, after=self.right, shift=offset
        )

    def q_bounds(self, k_start: Index, k_size: int, *, q_length: Index, kv_length: Index) -> Bounds:
        """Queries to visit for the keys [k_start, k_start + k_size): the mirror of `kv_bounds`.

        >>> Mask(is_causal=True).q_bounds(4, 4, q_length=16, kv_length=16)
        Bounds(lo=4, full_lo=7, full_hi=16, hi=16)
        """
        # i + offset - left <= j <= i + offset + right, solved for i.
        offset = self.offset(q_length, kv_length)
        return self._bounds(
            k_start, k_size, kv_length, q_length, before=self.right, after=self.left, shift=-offset
        )

    def _bounds(
        self,
        start: Index,
        size: int,
        length: Index,
        other_length: Index,
        *,
        before: int | None,
        after: int | None,
        shift: Index,
    ) -> Bounds:
        """Bounds of y where x sees y iff x + shift - before <= y <= x + shift + after."""
        end = _minimum(start + size, length)
        if self.has_positions:
            before = after = None
        lo = 0 if before is None else _maximum(start + shift - before, 0)
        hi = other_length if after is None else _minimum(end + shift + after, other_length)
        full_lo = 0 if before is None else end - 1 + shift - before
        full_hi = other_length if after is None else start + 1 + shift + after
        # Nothing is visible from a tile that lies behind its own length.
        hi = _where(start < length, _maximum(hi, lo), lo)
        full_lo = _clip(full_lo, lo, hi)
        full_hi = _clip(full_hi, full_lo, hi)
        # A tile that crosses its own length has rows to mask whatever the other side is.
        whole = start + size <= length if self.is_interval else False
        return Bounds(lo, _where(whole, full_lo, lo), _where(whole, full_hi, lo), hi)

    def row_bounds(
        self, q_index: Index, *, q_length: Index, kv_length: Index
    ) -> tuple[Index | None, Index]:
        """Keys [lo, hi) that each query sees, for a mask that `is_interval`; lo None is 0.

        Two comparisons with numbers that a row computes once, where `visible` compares places
        element by element: for kernels whose masked tiles are short of issue slots.

        >>> Mask(is_causal=True, window=(2, 0)).row_bounds(5, q_length=8, kv_length=8)
        (3, 6)
        """
        place = q_index + self.offset(q_length, kv_length)
        hi = kv_length if self.right is None else _minimum(place + (self.right + 1), kv_length)
        lo = None if self.left is None else place - self.left
        return lo, _where(q_index < q_length, hi, 0)

    def key_bounds(
        self, k_index: Index, *, q_length: Index, kv_length: Index
    ) -> tuple[Index | None, Index]:
        """Queries [lo, hi) that see each key, for a mask that `is_interval`; lo None is 0.

        The mirror of `row_bounds`, for kernels that hold keys in rows.

        >>> Mask(is_causal=True, window=(2, 0)).key_bounds(3, q_length=8, kv_length=8)
        (3, 6)
        """
        place = k_index - self.offset(q_length, kv_length)
        hi = q_length if self.left is None else _minimum(place + (self.left + 1), q_length)
        lo = None if self.right is None else place - self.right
        return lo, _where(k_index < kv_length, hi, 0)

    # ---- elements -------------------------------------------------------------------------------

    def visible(
        self,
        q_index: Index,
        k_index: Index,
        *,
        q_length: Index,
        kv_length: Index,
        q_segment: Index = None,
        kv_segment: Index = None,
        q_position: Index = None,
        kv_position: Index = None,
        dense: Index = None,
    ) -> Array:
        """The element mask of one tile, of the shape that the arguments broadcast to.

        Args:
          q_index, k_index: indices in the sequence, e.g. from `broadcasted_iota`; shapes
            (q, 1) and (1, k), or both (q, k).
          q_length, kv_length: lengths of this batch row (T and S where it has none).
          q_segment, kv_segment: this tile's segment ids, shaped as the indices; needed iff
            `has_segments`.
          q_position, kv_position: this tile's positions; needed iff the mask has them.
          dense: this tile's part of `dense` (and of an evaluated `mask_mod`), bool.

        Returns: bool, True where the query sees the key.
        """
        seen = (q_index < q_length) & (k_index < kv_length)
        q_place, k_place = self.places(
            q_index, k_index, q_length, kv_length, q_position, kv_position
        )
        if self.left is not None:
            seen &= k_place >= q_place - self.left
        if self.right is not None:
            seen &= k_place <= q_place + self.right
        if self.has_segments:
            seen &= (q_segment == kv_segment) & (q_segment >= 0)
        if dense is not None:
            seen &= dense
        return seen

    def places(
        self,
        q_index: Index,
        k_index: Index,
        q_length: Index,
        kv_length: Index,
        q_position: Index = None,
        kv_position: Index = None,
    ) -> tuple[Index, Index]:
        """Coordinates that causal, window and ALiBi compare: positions, or aligned indices."""
        offset = self.offset(q_length, kv_length)
        q_place = q_index + offset if q_position is None else q_position
        k_place = k_index if kv_position is None else kv_position
        return q_place, k_place


def row_lengths(lengths: Array | None, batch: int, size: int) -> Array:
    """Lengths as int32 (B,), with the array's own size where none were given, never beyond it."""
    if lengths is None:
        return jnp.full((batch,), size, jnp.int32)
    return jnp.clip(lengths.astype(jnp.int32), 0, size)


# Bounds are Python ints when everything is known while tracing (so that loops unroll and
# doctests read well) and traced scalars otherwise; these four keep both working.


def _static(*values: Index) -> bool:
    return all(isinstance(value, (int, bool)) for value in values)


def _minimum(a: Index, b: Index) -> Index:
    return min(a, b) if _static(a, b) else jnp.minimum(a, b)


def _maximum(a: Index, b: Index) -> Index:
    return max(a, b) if _static(a, b) else jnp.maximum(a, b)


def _clip(value: Index, low: Index, high: Index) -> Index:
    return _minimum(_maximum(value, low), high)


def _where(condition: Index, a: Index, b: Index) -> Index:
    if _static(condition):
        return a if condition else b
    return jnp.where(condition, a, b)


def _ceil_div(a: Index, b: int) -> Index:
    return (a + b - 1) // b
