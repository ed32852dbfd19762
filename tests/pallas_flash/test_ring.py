"""Context parallelism against one call on one device, in value and all gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import QUICK

import pallas_flash
from pallas_flash import ring

B, T, N, K, H = 2, 48, 4, 2, 8
KEYS = jax.random.split(jax.random.key(0), 4)
ARRAYS = {
    "query": jax.random.normal(KEYS[0], (B, T, N, H)),
    "key": jax.random.normal(KEYS[1], (B, T, K, H)),
    "value": jax.random.normal(KEYS[2], (B, T, K, H)),
    "sinks": jnp.array([0.0, 1.0, -1.0, 2.0]),
    "alibi_slopes": jnp.array([0.3, 0.1, 0.0, 0.5]),
}
WEIGHT = jax.random.normal(KEYS[3], (B, T, N, H))
IDS = jnp.asarray(np.repeat([[0, 1, 2, -1], [5, 6, 6, 7]], 12, axis=1), jnp.int32)
FORMS: dict[str, Any] = {"ring": ring.ring_attention, "all-gather": ring.all_gather_attention}
reference: Any = pallas_flash.dot_product_attention


def sharded(form: str, shards: int, layout: Any, options: dict[str, Any]):
    """The whole-sequence function, computed by `shards` simulated devices."""
    order = ring.zigzag_order(T, shards) if layout == "zigzag" else np.arange(T)

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x[:, order].reshape(B, shards, T // shards, *x.shape[2:]), 1, 0)

    def join(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(B, T, *x.shape[3:])[:, np.argsort(order)]

    def whole(query, key, value, segments=None, **others):
        def one(query, key, value, ids):
            return FORMS[form](
                query, key, value, axis_name="x", layout=layout, return_residual=True,
                query_segment_ids=ids, key_value_segment_ids=ids, **others, **options,
            )  # fmt: skip

        ids = None if segments is None else split(segments)
        axes = (0, 0, 0, None if ids is None else 0)
        mapped = jax.vmap(one, axes, axis_name="x")(split(query), split(key), split(value), ids)
        return jax.tree.map(join, mapped)

    return whole


def one_device(query, key, value, segments=None, **others):
    return reference(
        query, key, value, query_segment_ids=segments, key_value_segment_ids=segments,
        implementation="reference", return_residual=True, **others,
    )  # fmt: skip


def value_and_grads(function: Any, names: list[str], **others: Any) -> list[np.ndarray]:
    def loss(arrays):
        out, lse = function(**arrays, **others)
        return jnp.sum(out * WEIGHT) + jnp.sum(jnp.where(lse == -jnp.inf, 0, lse) ** 2), (out, lse)

    arrays = {name: ARRAYS[name] for name in ("query", "key", "value", *names)}
    results = jax.jit(jax.grad(loss, has_aux=True), compiler_options=QUICK)(arrays)
    return [np.asarray(x) for x in jax.tree.leaves(results)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("shards", "layout", "names", "options"),
    [
        (1, "contiguous", [], {"is_causal": True}),
        (3, "contiguous", ["sinks"], {}),
        (4, "zigzag", ["sinks", "alibi_slopes"], {"is_causal": True, "logits_soft_cap": 3.0}),
        (8, "zigzag", [], {"is_causal": True, "local_window_size": (20, None)}),
    ],
    ids=["one", "odd", "zigzag", "eight"],
)
def test_equals_one_device(form, shards, layout, names, options):
    got = value_and_grads(sharded(form, shards, layout, options), names)
    want = value_and_grads(one_device, names, **options)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=5e-5)


def test_segments_travel_with_the_keys():
    got = value_and_grads(sharded("ring", 4, "contiguous", {}), [], segments=IDS)
    want = value_and_grads(one_device, [], segments=IDS)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_zigzag_balances_a_causal_mask(shards):
    length = 2 * shards * 5
    order = ring.zigzag_order(length, shards)
    work = (order + 1).reshape(shards, -1).sum(axis=1)
    assert (work == work[0]).all()
    places = [ring.shard_positions(10, r, shards, "zigzag") for r in range(shards)]
    np.testing.assert_array_equal(np.concatenate(places), order)


def test_lengths_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="multiple of 2 \\* shards"):
        ring.zigzag_order(10, 4)
    with pytest.raises(ValueError, match="even query length"):
        jax.vmap(
            lambda x: ring.ring_attention(x, x, x, axis_name="x", layout="zigzag"), axis_name="x"
        )(jnp.ones((2, 1, 3, 2, 8)))
    with pytest.raises(TypeError, match="does not take bias"):
        jax.vmap(
            lambda x: ring.all_gather_attention(x, x, x, axis_name="x", bias=x), axis_name="x"
        )(jnp.ones((2, 1, 4, 2, 8)))
