"""The (max, denominator, output) algebra of online softmax.

Softmax attention over a set of keys is summed up by three numbers per query,

    m = max_j s_j,   l = sum_j exp(s_j - m),   o = sum_j exp(s_j - m) v_j,

and the answer is ``o / l`` with ``LSE = m + log l``. Keys may arrive in any order and any grouping:
`update` adds a tile of keys, `merge` joins two disjoint sets. `merge` is associative and
commutative with `empty` as identity, which is why tiles, splits over processors and ring shards all
give the same result.

Sources: Milakov & Gimelshein 2018 (arXiv:1805.02867) for the update; Dao et al. 2022
(arXiv:2205.14135), section 3.1, for carrying the output along; Dao 2023 (arXiv:2307.08691),
section 3.1, for dividing once at the end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class State(NamedTuple):
    """What is known about each query after some of its keys.

    Attributes:
      m: largest logit so far, -inf where nothing was visible yet. A constant to derivatives: the
        results do not depend on the shift, so its paths cancel.
      l: sum of exp(logit - m).
      o: sum of exp(logit - m) * value, not yet divided by l.
    """

    m: Float[Array, "*rows q"]
    l: Float[Array, "*rows q"]
    o: Float[Array, "*rows q Hv"]


def empty(rows: tuple[int, ...], value_dim: int, dtype: Any = jnp.float32) -> State:
    """The state of queries that have seen no key: the identity of `merge`.

    Args:
      rows: shape of the queries, e.g. (B, K, q).
      value_dim: Hv.
      dtype: of the statistics, float32 or float64.
    """
    zeros = jnp.zeros(rows, dtype)
    return State(jnp.full(rows, -jnp.inf, dtype), zeros, jnp.zeros((*rows, value_dim), dtype))


def update(
    state: State,
    logits: Float[Array, "*rows q k"],
    values: Float[Array, "*rows k Hv"],
    *,
    weights: Float[Array, "*rows q k"] | None = None,
    precision: Any = None,
) -> State:
    """Add a tile of keys: three lines and a rescale.

        m' = max(m, max_j s_j)
        l' = exp(m - m') l + sum_j exp(s_j - m')
        o' = exp(m - m') o + sum_j exp(s_j - m') v_j

    Args:
      state: over the keys before.
      logits: of the new keys; -inf where hidden.
      values: of the new keys; must be finite where the logit is -inf.
      weights: multiplies the terms of o but not of l (dropout), or None.
      precision: of the product with the values.

    >>> state = empty((1,), 1)
    >>> for s, v in [([0.0, 1.0], [[1.0], [2.0]]), ([3.0], [[4.0]])]:
    ...     state = update(state, jnp.array([s]), jnp.array(v))
    >>> out, lse = finalise(state)
    >>> whole = jax.nn.softmax(jnp.array([0.0, 1.0, 3.0])) @ jnp.array([1.0, 2.0, 4.0])
    >>> bool(jnp.allclose(out[0, 0], whole))
    True
    """
    m = jax.lax.stop_gradient(jnp.maximum(state.m, jnp.max(logits, axis=-1)))
    shift = finite(m)
    rescale = jnp.exp(state.m - shift)
    p = jnp.exp(logits - shift[..., None])
    l = rescale * state.l + jnp.sum(p, axis=-1)
    p = p if weights is None else p * weights
    o = rescale[..., None] * state.o + jnp.matmul(p, values, precision=precision)
    return State(m, l, o)


def merge(a: State, b: State) -> State:
    """Join the states of two disjoint sets of keys, in either order.

    >>> nothing = empty((1,), 1)
    >>> a = update(nothing, jnp.array([[0.0]]), jnp.array([[1.0]]))
    >>> b = update(nothing, jnp.array([[2.0]]), jnp.array([[5.0]]))
    >>> bool(jnp.allclose(merge(a, b).o, merge(b, a).o))
    True
    """
    m = jax.lax.stop_gradient(jnp.maximum(a.m, b.m))
    shift = finite(m)
    scale_a, scale_b = jnp.exp(a.m - shift), jnp.exp(b.m - shift)
    l = scale_a * a.l + scale_b * b.l
    o = scale_a[..., None] * a.o + scale_b[..., None] * b.o
    return State(m, l, o)


def add_sink(state: State, sink: Float[Array, "*#rows #q"]) -> State:
    """Add a logit that joins the denominator and brings no value.

    >>> state = add_sink(empty((1,), 1), jnp.array([2.0]))
    >>> out, lse = finalise(state)
    >>> float(out[0, 0]), float(lse[0])
    (0.0, 2.0)
    """
    sink = jnp.broadcast_to(sink, state.m.shape).astype(state.m.dtype)
    seen = (sink != -jnp.inf).astype(sink.dtype)
    return merge(state, State(sink, seen, jnp.zeros_like(state.o)))


def finalise(state: State) -> tuple[Float[Array, "*rows q Hv"], Float[Array, "*rows q"]]:
    """Output and LSE; 0 and -inf for queries that saw nothing. NaN stays NaN."""
    nothing = state.l == 0
    l = jnp.where(nothing, 1, state.l)
    lse = jnp.where(nothing, -jnp.inf, state.m + jnp.log(l))
    return state.o / l[..., None], lse


def merge_outputs(
    outs: Float[Array, "parts *rows q Hv"], lses: Float[Array, "parts *rows q"]
) -> tuple[Float[Array, "*rows q Hv"], Float[Array, "*rows q"]]:
    """Join finished outputs of disjoint key sets by their LSEs.

        lse = log sum_p exp(lse_p),   out = sum_p exp(lse_p - lse) out_p

    >>> out, lse = merge_outputs(jnp.array([[[1.0]], [[3.0]]]), jnp.zeros((2, 1)))
    >>> float(out[0, 0])
    2.0
    """
    m = finite(jnp.max(lses, axis=0))
    weights = jnp.exp(lses - m)
    l = jnp.sum(weights, axis=0)
    return finalise(State(m, l, jnp.sum(weights[..., None] * outs, axis=0)))


def finite(m: Float[Array, ...]) -> Float[Array, ...]:
    """The shift of the exponentials: -inf - (-inf) is NaN, so a row of -inf is shifted by 0."""
    return jax.lax.stop_gradient(jnp.where(m == -jnp.inf, 0, m))
