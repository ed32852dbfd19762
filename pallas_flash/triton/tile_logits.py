"""Logits of one tile inside a kernel: `pallas_flash.logits` on what the kernel has loaded.

The maths and the order are those of `pallas_flash.logits`; here are the loads, and the derivative
where the logits are more than a sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_flash import dropout
from pallas_flash.logits import Terms, logits, visible
from pallas_flash.logits import Tile as Place
from pallas_flash.triton.mods import Places, TileMod, read_lookups
from pallas_flash.triton.problem import Index, Operands, Problem
from pallas_flash.triton.tile import Rows, dot, load_scalar
from pallas_flash.triton.tile_sizes import Tile

Ref = Any


class Gradients(NamedTuple):
    """Cotangents of one tile's logits, handed back to what they were made of."""

    scores: jax.Array  # of scale * q k^T, hence of a bias
    slopes: jax.Array | None = None  # (queries, 1): of the head's slope, by query
    lookups: tuple[jax.Array, ...] = ()  # of what `score_mod` read in its captured arrays


class Chain(NamedTuple):
    """One tile's logits with the way back."""

    logits: jax.Array
    pull_back: Callable[[jax.Array], Gradients]
    places: tuple[Places, ...]  # where `score_mod` read


@dataclasses.dataclass(frozen=True)
class Logits:
    """Tiles of logits of one batch row, inside a kernel.

    Attributes:
      refs: the kernel's operands.
      batch: the batch row.
      first_head: the query head that is number 0 in the program's blocks.
      q_length, kv_length: T_b and S_b.
      keys_first: tiles are (keys, queries) instead of (queries, keys).
    """

    problem: Problem
    tile: Tile
    refs: Operands
    batch: Index
    first_head: Index
    q_length: Index
    kv_length: Index
    keys_first: bool = False

    def __call__(
        self, rows: jax.Array, columns: jax.Array, queries: Rows, keys: Rows, *,
        masked: bool, head: Index = 0,
    ) -> jax.Array:  # fmt: skip
        """Logits such that exp2(logits * problem.exponent_scale) is the softmax's numerator.

        Args:
          rows, columns: the tile's queries and keys, or its keys and queries if `keys_first`.
          queries, keys: where they stand.
          masked: set what the mask hides to -inf; False promises that it hides nothing here.
          head: this query head's number in the program's blocks.
        """
        return self.chain(rows, columns, queries, keys, masked=masked, head=head).logits

    def chain(
        self,
        rows: jax.Array,
        columns: jax.Array,
        queries: Rows,
        keys: Rows,
        *,
        masked: bool,
        head: Index = 0,
        by: frozenset[str] | None = None,
    ) -> Chain:
        """The same, with gradients.

        Args:
          by: of which operands beside the scores the gradient is wanted, of "alibi_slopes" and
            "score_mod"; None when `pull_back` will not be called.
        """
        problem = self.problem
        scores = dot(rows, columns, transpose_b=True)
        if not problem.defers_scale:
            scores *= self.scale
        place = self._place(queries, keys, head, masked)
        seen = self._visible(place) if masked else None
        if problem.has_plain_logits:
            shown = scores if seen is None else jnp.where(seen, scores, -jnp.inf)
            return Chain(shown, Gradients, ())
        terms, places = self._terms(place, queries, keys, head, masked)
        seen = jnp.bool_(True) if seen is None else seen
        chosen = _by_query(terms, by or frozenset(), self.tile.query)

        def finish(scores: jax.Array, chosen: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
            changed = dict(chosen)
            if "score_mod" in changed and isinstance(terms.score_mod, TileMod):
                changed["score_mod"] = terms.score_mod.with_floats(changed["score_mod"])
            return logits(scores, terms._replace(**changed), seen, problem, place)

        if by is None or not (problem.is_nonlinear or chosen):
            s, shown = finish(scores, {})
            return Chain(jnp.where(shown, s, -jnp.inf), Gradients, places)
        s, pull_back, shown = jax.vjp(finish, scores, chosen, has_aux=True)

        def gradients(ds: jax.Array) -> Gradients:
            scores, found = pull_back(jnp.where(shown, ds, 0))
            return Gradients(scores, found.get("alibi_slopes"), found.get("score_mod", ()))

        return Chain(jnp.where(shown, s, -jnp.inf), gradients, places)

    def keep(self, queries: Rows, keys: Rows, head: Index = 0) -> jax.Array:
        """Which elements of the tile survive dropout."""
        seed = self.refs.dropout_seed
        place = self._place(queries, keys, head, masked=False)
        return dropout.keep(
            (load_scalar(seed, 0), load_scalar(seed, 1)),  # pyright: ignore
            self.problem.dropout_rate,
            head=self.batch * self.problem.sizes.N + self.first_head + head,
            q_index=place.q_index,
            k_index=place.k_index,
        )

    @property
    def scale(self) -> Any:
        if self.problem.scale is not None:
            return self.problem.scale
        return load_scalar(self.refs.scale, 0)

    # ---- operands of one tile -------------------------------------------------------------------

    def of_queries(self, x: jax.Array | None) -> jax.Array | None:
        """A vector by query as it broadcasts to the tile."""
        if x is None:
            return None
        return x[None, :] if self.keys_first else x[:, None]

    def of_keys(self, x: jax.Array | None) -> jax.Array | None:
        if x is None:
            return None
        return x[:, None] if self.keys_first else x[None, :]

    def _place(self, queries: Rows, keys: Rows, head: Index, masked: bool) -> Place:
        dense = None
        if masked and self.refs.dense is not None:
            dense = self._dense(self.refs.dense, queries, keys, head, masked)
        return Place(
            batch=jnp.int32(self.batch),
            head=jnp.int32(self.first_head + head),
            q_index=self.of_queries(queries.index),
            k_index=self.of_keys(keys.index),
            q_length=self.q_length,
            kv_length=self.kv_length,
            q_segment=self.of_queries(queries.segment),
            kv_segment=self.of_keys(keys.segment),
            q_position=self.of_queries(queries.position),
            kv_position=self.of_keys(keys.position),
            dense=dense,
        )

    def _visible(self, place: Place) -> jax.Array:
        mask, mod = self.problem.mask, self.problem.mask_mod
        if mod is not None:
            where = (place.batch, place.head, place.q_index, place.k_index)
            here, _ = read_lookups(mod, self.refs.mask_tables, *where)
            mask = dataclasses.replace(mask, mask_mod=here)
        return visible(mask, place)

    def _terms(
        self, place: Place, queries: Rows, keys: Rows, head: Index, masked: bool
    ) -> tuple[Terms, tuple[Places, ...]]:
        refs, places, values = self.refs, (), {}
        if refs.bias is not None:
            values["bias"] = self._dense(refs.bias, queries, keys, head, masked)
        if refs.alibi_slopes is not None:
            values["alibi_slopes"] = load_scalar(refs.alibi_slopes, place.head)
        if self.problem.score_mod is not None:
            where = (place.batch, place.head, place.q_index, place.k_index)
            values["score_mod"], places = read_lookups(
                self.problem.score_mod, refs.score_tables, *where
            )
        return Terms(**values), places

    def _dense(self, ref: Ref, queries: Rows, keys: Rows, head: Index, masked: bool) -> jax.Array:
        """This tile's part of a (heads, T, S) bias or mask whose broadcast axes have size 1."""
        heads, rows, columns = ref.shape
        sizes, tile = self.problem.sizes, self.tile
        q_start, q_size = (0, 1) if rows == 1 else (queries.start, tile.query)
        k_start, k_size = (0, 1) if columns == 1 else (keys.start, tile.key)
        keep, other = None, None
        if masked:
            inside_q = q_start + _ruler(q_size, 0) < sizes.T
            keep = inside_q & (k_start + _ruler(k_size, 1) < sizes.S)
            other = jnp.zeros((), ref.dtype)
        head = jnp.int32(0 if heads == 1 else head)
        view = ref.at[head, pl.ds(q_start, q_size), pl.ds(k_start, k_size)]
        block = plgpu.load(view, mask=keep, other=other)
        return block.T if self.keys_first else block


def _by_query(terms: Terms, by: frozenset[str], queries: int) -> dict[str, Any]:
    """The operands to differentiate by; scalars once for each query.

    Their gradients are then sums along the keys alone: the lowering sums along one axis at a time.
    """

    def spread(x: jax.Array) -> jax.Array:
        return x if x.ndim else jnp.full((queries, 1), x)

    chosen: dict[str, Any] = {}
    if "alibi_slopes" in by and terms.alibi_slopes is not None:
        chosen["alibi_slopes"] = spread(terms.alibi_slopes)
    if "score_mod" in by and isinstance(terms.score_mod, TileMod):
        chosen["score_mod"] = tuple(spread(x) for x in terms.score_mod.floats)
    return chosen


def _ruler(size: int, axis: int) -> jax.Array:
    """0, 1, ... along one axis of a matrix, 1 wide along the other."""
    return lax.broadcasted_iota(jnp.int32, (size, 1) if axis == 0 else (1, size), axis)
