"""The tiles of one call for the scan in `pallas_flash.xla`: packing, slicing and the two loops.

Arrays are packed once: heads before rows, padded to whole tiles, and zero where a length or a
padding segment hides them (0 * NaN is NaN). Query tiles are numbered i; key tiles j, where j is one
number for the whole batch, or one for each batch row where the mask makes rows differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_flash import dropout, tiles
from pallas_flash.call import AttentionCall, Sizes
from pallas_flash.implementations import current_platform
from pallas_flash.logits import Terms, Tile
from pallas_flash.mask import row_lengths
from pallas_flash.reference import real_rows
from pallas_flash.schedule import Schedule, schedule
from pallas_flash.varying import vary_like

Carry = TypeVar("Carry")
Cut = tuple[int, Any, int]
"""Axis, tile number (or one for each batch row), elements per tile."""


@dataclasses.dataclass(frozen=True)
class ScanTiles:
    """One call, packed for tiles.

    Attributes:
      call: the call, with bias and the mask's arrays padded to whole tiles.
      caller: the call as it came.
      sizes: of `caller`.
      blocks: queries and keys per tile.
      q: (B, K, G, T', H), T' a whole number of tiles.
      k, v: (B, K, S', H) and (B, K, S', Hv).
      q_real: (B, T), False behind lengths and in padding; None when everything is real.
      schedule: the key tiles that each query tile visits.
    """

    call: AttentionCall
    caller: AttentionCall
    sizes: Sizes
    blocks: tiles.TileSizes
    q: Array
    k: Array
    v: Array
    q_real: Array | None
    schedule: Schedule

    @classmethod
    def of(cls, call: AttentionCall) -> ScanTiles:
        """Pack a call; every size must be at least 1."""
        sizes, mask = call.sizes, call.mask
        itemsize = jnp.promote_types(call.query.dtype, jnp.float32).itemsize
        blocks = tiles.for_scan(sizes, itemsize, current_platform())
        q_real, k_real = real_rows(mask, sizes.B, sizes.T, sizes.S)
        q, k, v = call.query, call.key, call.value
        if mask.query_lengths is None and not mask.has_segments:
            q_real = None
        else:
            q = jnp.where(q_real[:, :, None, None], q, 0)
        if mask.key_value_lengths is not None or mask.has_segments:
            k = jnp.where(k_real[:, :, None, None], k, 0)
            v = jnp.where(k_real[:, :, None, None], v, 0)
        return cls(
            call=_padded(call, blocks),
            caller=call,
            sizes=sizes,
            blocks=blocks,
            q=pack_queries(q, sizes, blocks.block_q),
            k=_pad(jnp.swapaxes(k, 1, 2), 2, blocks.block_kv),
            v=_pad(jnp.swapaxes(v, 1, 2), 2, blocks.block_kv),
            q_real=q_real,
            schedule=schedule(mask, sizes.B, sizes.T, sizes.S, (blocks.block_q, blocks.block_kv)),
        )

    @property
    def dtype(self) -> Any:
        """Of scores and statistics: float32, or float64 for float64 inputs."""
        return jnp.promote_types(self.call.query.dtype, jnp.float32)

    @property
    def precision(self) -> lax.Precision:
        """float32 inputs get float32 products, on GPUs too, where the default is TF32."""
        narrow = jnp.finfo(self.call.query.dtype).bits < 32
        return lax.Precision.DEFAULT if narrow else lax.Precision.HIGHEST

    @property
    def q_tiles(self) -> int:
        return -(-self.sizes.T // self.blocks.block_q)

    @property
    def kv_tiles(self) -> int:
        return -(-self.sizes.S // self.blocks.block_kv)

    @property
    def rows(self) -> tuple[int, int, int]:
        """Shape of one tile's queries, the group folded in: (B, K, G * block_q)."""
        return self.sizes.B, self.sizes.K, self.sizes.G * self.blocks.block_q

    # ---- loops ----------------------------------------------------------------------------------

    def over_queries(
        self, body: Callable[[Carry, Any], tuple[Carry, Any]], carry: Carry
    ) -> tuple[Carry, Any]:
        """Scan `body(carry, i) -> (carry, result)` over the query tiles; results are stacked."""
        if self.q_tiles == 1:
            carry, result = body(carry, 0)
            return carry, jax.tree.map(lambda x: x[None], result)
        return lax.scan(body, self.varying(carry), jnp.arange(self.q_tiles, dtype=jnp.int32))

    def over_keys(
        self, i: Any, body: Callable[[Any, Array | None, Carry], Carry], carry: Carry
    ) -> Carry:
        """Fold `body(j, active, carry)` over the key tiles that query tile i visits.

        `active` is None, or (B,) False for the batch rows whose own list has ended.
        """
        if self.q_tiles == 1 and self.kv_tiles == 1:
            return body(0, None, carry)
        order, count = self.schedule.order[:, i], self.schedule.count[:, i]
        uniform = len(order) == 1

        def step(t: Array, carry: Carry) -> Carry:
            if uniform:
                return body(order[0, t], None, carry)
            return body(order[:, t], t < count, carry)

        return lax.fori_loop(0, jnp.max(count), step, self.varying(carry))

    def varying(self, carry: Carry) -> Carry:
        """Inside `shard_map`, a loop's start must vary over the mesh axes that its result does."""
        return vary_like(carry, self.call)

    # ---- tiles ----------------------------------------------------------------------------------

    def query(self, i: Any) -> Float[Array, "B K Gq H"]:
        return self.fold(take_tile(self.q, (3, i, self.blocks.block_q))).astype(self.dtype)

    def key(self, j: Any) -> Float[Array, "B K k H"]:
        return take_tile(self.k, (2, j, self.blocks.block_kv)).astype(self.dtype)

    def value(self, j: Any) -> Float[Array, "B K k Hv"]:
        return take_tile(self.v, (2, j, self.blocks.block_kv)).astype(self.dtype)

    def fold(self, x: Array) -> Array:
        """(B, K, G, q, ...) -> (B, K, G * q, ...): the group's queries are rows of one product."""
        return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])

    def by_head(self, x: Array) -> Array:
        """(B, K, G * q[, k]) -> (B, N, q, k), with k = 1 for numbers per query."""
        return x.reshape(self.sizes.B, self.sizes.N, self.blocks.block_q, *(x.shape[3:] or (1,)))

    def cuts(self, i: Any, j: Any) -> tuple[Cut, Cut]:
        """Where tile (i, j) lies in an array (B|1, N|1, T|1, S|1)."""
        return (2, i, self.blocks.block_q), (3, j, self.blocks.block_kv)

    @property
    def slopes(self) -> Float[Array, "N 1 1"] | None:
        slopes = self.call.alibi_slopes
        return None if slopes is None else slopes[:, None, None]

    def terms(self, i: Any, j: Any) -> Terms:
        """The differentiable operands of this tile's logits."""
        bias = self.call.bias
        if bias is not None:
            bias = take_tile(bias, *self.cuts(i, j))
        return Terms(bias, self.slopes, self.call.score_mod)

    def place(self, i: Any, j: Any, active: Array | None) -> Tile:
        """Coordinates of this tile and its parts of the mask's arrays."""
        (B, T, S, N, *_), mask = self.sizes, self.call.mask
        block_q, block_kv = self.blocks.block_q, self.blocks.block_kv

        def per_row(x: Any) -> Array:
            return jnp.asarray(x, jnp.int32).reshape(-1, 1, 1, 1)

        def of_queries(array: Array | None) -> Array | None:
            return None if array is None else take_tile(array, (1, i, block_q))[:, None, :, None]

        def of_keys(array: Array | None) -> Array | None:
            return None if array is None else take_tile(array, (1, j, block_kv))[:, None, None, :]

        q_lengths, kv_lengths = mask.query_lengths, mask.key_value_lengths
        return Tile(
            batch=jnp.arange(B)[:, None, None, None],
            head=jnp.arange(N)[:, None, None],
            q_index=i * block_q + jnp.arange(block_q)[:, None],
            k_index=per_row(j) * block_kv + jnp.arange(block_kv),
            q_length=T if q_lengths is None else per_row(row_lengths(q_lengths, B, T)),
            kv_length=S if kv_lengths is None else per_row(row_lengths(kv_lengths, B, S)),
            q_segment=of_queries(mask.query_segment_ids),
            kv_segment=of_keys(mask.key_value_segment_ids),
            q_position=of_queries(mask.query_positions),
            kv_position=of_keys(mask.key_value_positions),
            dense=None if mask.dense is None else take_tile(mask.dense, *self.cuts(i, j)),
            active=None if active is None else per_row(active) > 0,
        )

    def dropout_weights(self, tile: Tile) -> Float[Array, "B N q k"] | None:
        """0 for dropped elements and 1 / (1 - rate) for kept ones; None without dropout."""
        call = self.call
        if call.dropout_seed is None:
            return None
        kept = dropout.keep(
            call.dropout_seed,
            call.dropout_rate,
            head=tile.batch * self.sizes.N + tile.head,
            q_index=tile.q_index,
            k_index=tile.k_index,
        )
        return jnp.where(kept, jnp.asarray(1 / (1 - call.dropout_rate), self.dtype), 0)


def pack_queries(x: Array, sizes: Sizes, block: int) -> Array:
    """(B, T, N, ...) -> (B, K, G, T', ...)."""
    x = x.reshape(*x.shape[:2], sizes.K, sizes.G, *x.shape[3:])
    return _pad(jnp.moveaxis(x, 1, 3), 3, block)


def unpack_queries(tiles_of_x: Array, sizes: Sizes, block: int) -> Array:
    """Stacked tiles (q_tiles, B, K, G * q, ...) -> (B, N, T, ...)."""
    count, _, _, _, *rest = tiles_of_x.shape
    x = tiles_of_x.reshape(count, sizes.B, sizes.N, block, *rest)
    x = jnp.moveaxis(x, 0, 2).reshape(sizes.B, sizes.N, count * block, *rest)
    return x[:, :, : sizes.T]


def _padded(call: AttentionCall, blocks: tiles.TileSizes) -> AttentionCall:
    """The call with bias and the mask's arrays padded to whole tiles, once, outside the loops."""
    _, T, S, *_ = call.sizes

    def matrix(x: Array | None) -> Array | None:
        return None if x is None else _pad(_pad(x, 2, blocks.block_q, T), 3, blocks.block_kv, S)

    def row(x: Array | None, block: int) -> Array | None:
        return None if x is None else _pad(x, 1, block)

    mask = dataclasses.replace(
        call.mask,
        query_segment_ids=row(call.mask.query_segment_ids, blocks.block_q),
        key_value_segment_ids=row(call.mask.key_value_segment_ids, blocks.block_kv),
        query_positions=row(call.mask.query_positions, blocks.block_q),
        key_value_positions=row(call.mask.key_value_positions, blocks.block_kv),
        dense=matrix(call.mask.dense),
    )
    return dataclasses.replace(call, bias=matrix(call.bias), mask=mask)


def _pad(x: Array, axis: int, block: int, size: int | None = None) -> Array:
    """Pad with zeros to whole tiles; an axis that is broadcast (1 long, not `size`) stays."""
    missing = -x.shape[axis] % block
    if missing == 0 or x.shape[axis] != (size or x.shape[axis]):
        return x
    return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)])


def take_tile(x: Array, *cuts: Cut) -> Array:
    """A tile of x: along each cut's axis, the tile of that number; broadcast axes stay 1 long.

    A tile number may be one for each batch row; then the result has every batch row, each with its
    own tile, whether or not x has a batch.
    """
    cuts = _real_cuts(x, cuts)
    if not cuts:
        return x
    if not _by_row(cuts):
        sizes = list(x.shape)
        for axis, _, block in cuts:
            sizes[axis] = block
        return lax.dynamic_slice(x, _starts(x, cuts), sizes)
    numbers, axes = _numbers(cuts)
    broadcast = x.shape[0] == 1

    def of_row(row: Array, *numbers: Array) -> Array:
        return take_tile(row, *_inner(cuts, numbers))

    return jax.vmap(of_row, (None if broadcast else 0, *axes))(x[0] if broadcast else x, *numbers)


def add_tile(total: Array, update: Array, *cuts: Cut) -> Array:
    """`total` with `update` added to one tile: the transpose of `take_tile`."""
    cuts = _real_cuts(total, cuts)
    if not cuts:
        return total + update
    if not _by_row(cuts):
        starts = _starts(total, cuts)
        old = lax.dynamic_slice(total, starts, update.shape)
        return lax.dynamic_update_slice(total, old + update, starts)
    numbers, axes = _numbers(cuts)
    if total.shape[0] == update.shape[0]:

        def of_row(total: Array, update: Array, *numbers: Array) -> Array:
            return add_tile(total, update, *_inner(cuts, numbers))

        return jax.vmap(of_row, (0, 0, *axes))(total, update, *numbers)

    # A total without a batch takes the rows one after the other: no scatter, so always in order.
    def add_row(b: Array, total: Array) -> Array:
        mine = [n if axis is None else n[b] for n, axis in zip(numbers, axes, strict=True)]
        return add_tile(total[0], update[b], *_inner(cuts, mine))[None]

    return lax.fori_loop(0, update.shape[0], add_row, total)


def _starts(x: Array, cuts: tuple[Cut, ...]) -> list[Array]:
    starts = [jnp.int32(0)] * x.ndim
    for axis, number, block in cuts:
        starts[axis] = jnp.asarray(number, jnp.int32) * block
    return starts


def _real_cuts(x: Array, cuts: tuple[Cut, ...]) -> tuple[Cut, ...]:
    return tuple(cut for cut in cuts if x.shape[cut[0]] not in (1, cut[2]))


def _by_row(cuts: tuple[Cut, ...]) -> bool:
    return any(jnp.ndim(number) for _, number, _ in cuts)


def _numbers(cuts: tuple[Cut, ...]) -> tuple[list[Any], list[int | None]]:
    """Tile numbers, and the axis that `vmap` maps over in each."""
    numbers = [number for _, number, _ in cuts]
    return numbers, [0 if jnp.ndim(number) else None for number in numbers]


def _inner(cuts: tuple[Cut, ...], numbers: Any) -> list[Cut]:
    """The same cuts for one batch row, whose axes are one further left."""
    pairs = zip(cuts, numbers, strict=True)
    return [(axis - 1, number, block) for (axis, _, block), number in pairs]
