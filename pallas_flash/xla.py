"""Tiled online softmax as a scan over tiles in plain JAX: any device, O(n) memory.

    for each query tile i:                       forward
        m, l, o = -inf, 0, 0
        for each key tile j that i visits:
            (m, l, o) = update((m, l, o), logits of the tile, v_j)
        out_i, lse_i = finalise(m, l, o)

    for each query tile i:                       backward
        for each key tile j that i visits:
            p  = exp(logits - lse_i)             recomputed, never stored
            dv_j += p^T do_i
            ds = p (do_i v_j^T - delta_i)        delta = rowsum(do * out) - dlse
            dq_i += ds k_j;  dk_j += ds^T q_i

Which tiles a query tile visits comes from `pallas_flash.schedule`, by batch row where the mask
differs by row. A call that fits one tile runs the two bodies once, without a loop. Grouped heads
stay grouped: a key/value head is read once for its G query heads, and its gradient is summed over
them in float32 by the contraction itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_flash import online_softmax
from pallas_flash.call import AttentionCall, Gradients
from pallas_flash.logits import Terms, logits, visible
from pallas_flash.scan_tiles import ScanTiles, add_tile, pack_queries, take_tile, unpack_queries

NAME = "xla"


def unsupported(call: AttentionCall, platform: str) -> str | None:
    """The scan serves every call on every platform."""
    del call, platform
    return None


def forward(call: AttentionCall) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """Output in the query's dtype and LSE in float32 (float64 for float64)."""
    tiles = ScanTiles.of(call)
    start = online_softmax.empty(tiles.rows, tiles.sizes.Hv, tiles.dtype)
    if call.sinks is not None:
        sinks = call.sinks.reshape(tiles.sizes.K, tiles.sizes.G)
        start = online_softmax.add_sink(start, jnp.repeat(sinks, tiles.blocks.block_q, axis=1))

    def q_tile(_: None, i: Any) -> tuple[None, tuple[Array, Array]]:
        q = tiles.query(i)

        def visit(j: Any, active: Array | None, state: online_softmax.State):
            tile = tiles.place(i, j, active)
            s, seen = _logits(tiles, tile, _scores(tiles, q, tiles.key(j)), tiles.terms(i, j))
            s = jnp.where(seen, s, -jnp.inf).reshape(*tiles.rows, -1)
            weights = tiles.dropout_weights(tile)
            if weights is not None:
                weights = weights.reshape(s.shape)
            return online_softmax.update(
                state, s, tiles.value(j), weights=weights, precision=tiles.precision
            )

        return None, online_softmax.finalise(tiles.over_keys(i, visit, start))

    _, (out, lse) = tiles.over_queries(q_tile, None)
    out = unpack_queries(out, tiles.sizes, tiles.blocks.block_q)
    lse = unpack_queries(lse, tiles.sizes, tiles.blocks.block_q)
    return jnp.swapaxes(out, 1, 2).astype(call.query.dtype), lse


def _scores(tiles: ScanTiles, q: Array, k: Array) -> Float[Array, "B N q k"]:
    qk = _product(tiles, q, jnp.swapaxes(k, 2, 3))
    return tiles.by_head(qk * tiles.call.scale)


def _logits(tiles: ScanTiles, tile: Any, scores: Array, terms: Terms) -> tuple[Array, Array]:
    return logits(scores, terms, visible(tiles.call.mask, tile), tiles.call, tile)


class _Sums(NamedTuple):
    """Gradients that many query tiles add to, float32; None where not wanted."""

    k: Array
    v: Array
    terms: dict[str, Any]


def backward(
    call: AttentionCall,
    out: Float[Array, "B T N Hv"],
    lse: Float[Array, "B N T"],
    dout: Float[Array, "B T N Hv"],
    dlse: Float[Array, "B N T"] | None,
    wanted: frozenset[str],
) -> Gradients:
    """Gradients of the wanted fields, from recomputed tiles."""
    tiles = ScanTiles.of(call)
    sizes, dtype, block_q = tiles.sizes, tiles.dtype, tiles.blocks.block_q
    dout = _behind_lengths_zero(tiles, dout)
    delta = jnp.sum(dout.astype(dtype) * out.astype(dtype), axis=-1)
    if dlse is not None:
        delta = delta - jnp.swapaxes(dlse, 1, 2)
    do_packed = pack_queries(dout, sizes, block_q)
    rows = pack_queries(
        jnp.stack([online_softmax.finite(jnp.swapaxes(lse, 1, 2)), delta], -1), sizes, block_q
    )

    def q_tile(sums: _Sums, i: Any) -> tuple[_Sums, Array]:
        q = tiles.query(i)
        do = tiles.fold(take_tile(do_packed, (3, i, block_q))).astype(dtype)
        lse_i, delta_i = jnp.moveaxis(tiles.fold(take_tile(rows, (3, i, block_q))), -1, 0)

        def visit(j: Any, active: Array | None, carry: tuple[Array, _Sums]):
            return _backward_tile(tiles, wanted, (i, j, active), (q, do, lse_i, delta_i), carry)

        start = (jnp.zeros((*tiles.rows, sizes.H), dtype), sums)
        dq, sums = tiles.over_keys(i, visit, start)
        return sums, dq

    sums, dq = tiles.over_queries(q_tile, _start_sums(tiles, wanted))
    dq = jnp.swapaxes(unpack_queries(dq, sizes, block_q), 1, 2)
    return _collect(tiles, sums, dq, lse, delta, wanted)


def _behind_lengths_zero(tiles: ScanTiles, x: Float[Array, "B T N H"]) -> Array:
    """Rows that no length shows are zero: what lies there may be NaN."""
    return x if tiles.q_real is None else jnp.where(tiles.q_real[:, :, None, None], x, 0)


def _start_sums(tiles: ScanTiles, wanted: frozenset[str]) -> _Sums:
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, tiles.dtype),
        _differentiated(tiles, Terms(tiles.call.bias, tiles.slopes, tiles.call.score_mod), wanted),
    )
    return _Sums(
        jnp.zeros(tiles.k.shape, tiles.dtype), jnp.zeros(tiles.v.shape, tiles.dtype), zeros
    )


def _differentiated(tiles: ScanTiles, terms: Terms, wanted: frozenset[str]) -> dict[str, Any]:
    """The operands whose gradients are wanted, in the dtype that gradients are summed in."""
    chosen: dict[str, Any] = {}
    for name in ("bias", "alibi_slopes"):
        if name in wanted:
            chosen[name] = getattr(terms, name).astype(tiles.dtype)
    if terms.score_mod is not None and "score_mod" in wanted:
        chosen["score_mod"] = terms.score_mod.floating
    return chosen


def _substituted(terms: Terms, chosen: dict[str, Any]) -> Terms:
    """`terms` with the differentiated operands in place of its own."""
    chosen = dict(chosen)
    if terms.score_mod is not None and "score_mod" in chosen:
        chosen["score_mod"] = terms.score_mod.with_floating(chosen["score_mod"])
    return terms._replace(**chosen)


def _backward_tile(
    tiles: ScanTiles,
    wanted: frozenset[str],
    number: tuple[Any, Any, Array | None],
    queries: tuple[Array, Array, Array, Array],
    carry: tuple[Array, _Sums],
) -> tuple[Array, _Sums]:
    """Adds tile (i, j)'s part to every gradient."""
    (i, j, active), (q, do, lse, delta), (dq, sums) = number, queries, carry
    k, v, tile, terms = tiles.key(j), tiles.value(j), tiles.place(i, j, active), tiles.terms(i, j)

    def logits_of(scores: Array, chosen: dict[str, Any]) -> tuple[Array, Array]:
        return _logits(tiles, tile, scores, _substituted(terms, chosen))

    s, pull_back, seen = jax.vjp(
        logits_of, _scores(tiles, q, k), _differentiated(tiles, terms, wanted), has_aux=True
    )
    p = jnp.where(seen, jnp.exp(s - tiles.by_head(lse)), 0)
    dp = tiles.by_head(_product(tiles, do, jnp.swapaxes(v, 2, 3)))
    weights = tiles.dropout_weights(tile)
    dropped_p = p
    if weights is not None:
        dropped_p, dp = p * weights, dp * weights
    ds = jnp.where(seen, p * (dp - tiles.by_head(delta)), 0)
    ds, dterms = pull_back(ds)

    folded = (*tiles.rows, ds.shape[-1])
    ds, dropped_p = ds.reshape(folded), dropped_p.reshape(folded)
    cut = (2, j, tiles.blocks.block_kv)
    dk = add_tile(sums.k, _product(tiles, jnp.swapaxes(ds, 2, 3), q), cut)
    dv = add_tile(sums.v, _product(tiles, jnp.swapaxes(dropped_p, 2, 3), do), cut)
    return dq + _product(tiles, ds, k), _Sums(dk, dv, _add_terms(tiles, i, j, sums.terms, dterms))


def _product(tiles: ScanTiles, a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=tiles.precision)


def _add_terms(
    tiles: ScanTiles, i: Any, j: Any, total: dict[str, Any], new: dict[str, Any]
) -> dict[str, Any]:
    """Adds a tile's gradients of the terms; `pull_back` has summed them over broadcast axes."""
    total = dict(total)
    for name, gradient in new.items():
        if name == "bias":
            total[name] = add_tile(total[name], gradient, *tiles.cuts(i, j))
        else:
            total[name] = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total[name], gradient)
    return total


def _collect(
    tiles: ScanTiles, sums: _Sums, dq: Array, lse: Array, delta: Array, wanted: frozenset[str]
) -> Gradients:
    """From sums over tiles to gradients in the caller's layout."""
    call, sizes = tiles.caller, tiles.sizes
    terms: dict[str, Any] = dict(sums.terms)
    if call.bias is not None and "bias" in terms:
        terms["bias"] = terms["bias"][tuple(slice(n) for n in call.bias.shape)]
    if "alibi_slopes" in terms:
        terms["alibi_slopes"] = terms["alibi_slopes"][:, 0, 0]
    if call.score_mod is not None and "score_mod" in terms:
        terms["score_mod"] = call.score_mod.cotangents(terms["score_mod"])
    if call.sinks is not None and "sinks" in wanted:
        p_sink = jnp.exp(call.sinks.astype(tiles.dtype)[:, None] - online_softmax.finite(lse))
        terms["sinks"] = -jnp.sum(p_sink * jnp.swapaxes(delta, 1, 2), axis=(0, 2))
    if "traced_scale" in wanted:
        # d logits / d scale = q k^T, so the sum over ds * q k^T is that over q * (ds k).
        terms["traced_scale"] = jnp.sum(_behind_lengths_zero(tiles, call.query) * dq)
    return Gradients(
        query=dq * call.scale,
        key=jnp.swapaxes(sums.k[:, :, : sizes.S] * call.scale, 1, 2),
        value=jnp.swapaxes(sums.v[:, :, : sizes.S], 1, 2),
        **terms,
    )
