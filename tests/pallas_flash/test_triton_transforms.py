"""JAX's transformations of the Triton kernels, interpreted."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import QUICK

import pallas_flash

attention: Any = functools.partial(pallas_flash.dot_product_attention, implementation="triton")
reference: Any = functools.partial(pallas_flash.dot_product_attention, implementation="reference")
KEYS = jax.random.split(jax.random.key(0), 5)
Q = jax.random.normal(KEYS[0], (3, 2, 20, 4, 8))
K = jax.random.normal(KEYS[1], (3, 2, 24, 2, 8))
V = jax.random.normal(KEYS[2], (3, 2, 24, 2, 8))
BIAS = jax.random.normal(KEYS[3], (3, 1, 4, 20, 24))
TABLE = jax.random.normal(KEYS[4], (3, 4, 6))
IDS = jnp.sort(jax.random.randint(KEYS[4], (3, 2, 24), -1, 3), axis=-1)
LENGTHS = jnp.array([[24, 9], [3, 0], [24, 24]])
SINKS = jnp.array([0.1, -1.0, 2.0, 0.0])


def rich(function, q, k, v, bias, table, ids, lengths):
    """A call with much to map over; the captured table too."""
    return function(
        q, k, v, bias, is_causal=True, sinks=SINKS, key_value_seq_lengths=lengths,
        query_segment_ids=ids[:, :20], key_value_segment_ids=ids,
        score_mod=lambda s, b, n, i, j: s + table[n, (i + j) % 6], return_residual=True,
    )  # fmt: skip


def loss(function, *arguments):
    out, lse = rich(function, *arguments)
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(jnp.where(lse == -jnp.inf, 0, lse)))


def assert_all_close(got, want):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=3e-5), got, want)


@pytest.mark.parametrize(
    "axes", [(0, 0, 0, 0, 0, 0, 0), (2, None, None, 0, None, None, 0)], ids=str
)
def test_vmap_of_gradients_over_any_axes(axes):
    """One is mapped over all arguments; one over few, from another axis."""
    arrays = [Q, K, V, BIAS, TABLE, IDS, LENGTHS]
    mapped = [
        x[0] if axis is None else jnp.moveaxis(x, 0, axis)
        for x, axis in zip(arrays, axes, strict=True)
    ]
    by = (0, 1, 2, 3, 4)

    def run(function):
        gradient = jax.value_and_grad(functools.partial(loss, function), by)
        return jax.jit(jax.vmap(gradient, axes), compiler_options=QUICK)(*mapped)

    assert_all_close(run(attention), run(reference))


def test_nested_vmap_without_a_batch_axis():
    q, k, v = Q[:, :, :9], K[:, 0, :11], V[:, :, :11]

    def run(function):
        return jax.vmap(jax.vmap(lambda q, k, v: function(q, k, v), (0, None, 0)))(q, k, v)

    assert_all_close(run(attention), run(reference))


def test_jacrev():
    q, k, v = Q[0, :, :3], K[0, :, :5], V[0, :, :5]

    def run(function):
        return jax.jit(jax.jacrev(lambda q: function(q, k, v)), compiler_options=QUICK)(q)

    assert_all_close(run(attention), run(reference))


def test_checkpoint_that_saves_the_names_runs_the_forward_kernel_once():
    names = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")

    def forwards(policy):
        layer = jax.checkpoint(lambda q: jnp.sum(attention(q, K[0], V[0]) ** 2), policy=policy)
        return str(jax.make_jaxpr(jax.value_and_grad(layer))(Q[0])).count("name=flash_forward")

    assert (forwards(names), forwards(None)) == (1, 2)


def test_second_derivatives_are_the_references():
    q, k, v = Q[0, :1, :5], K[0, :1, :6], V[0, :1, :6]

    def directional(function):
        def inner(q):
            out, lse = function(q, k, v, is_causal=True, return_residual=True)
            return jnp.sum(jnp.sin(out)) + jnp.sum(lse**2)

        outer = jax.grad(lambda q: jnp.sum(jax.grad(inner)(q) * jnp.cos(q)))
        return jax.jit(outer, compiler_options=QUICK)(q)

    assert_all_close(directional(attention), directional(reference))


@pytest.mark.parametrize("wrap", ["eager", "jit inside", "jit outside", "scan"])
def test_forward_mode_says_what_to_do(wrap):
    q = Q[0]

    def f(q):
        if wrap == "scan":
            return jax.lax.scan(lambda c, _: (c + attention(q, K[0], V[0]), None), q, length=2)[0]
        return attention(q, K[0], V[0])

    run = {
        "jit inside": lambda q: jax.jvp(jax.jit(f), (q,), (q,)),
        "jit outside": jax.jit(lambda q: jax.jvp(f, (q,), (q,))),
    }.get(wrap, lambda q: jax.jvp(f, (q,), (q,)))
    with pytest.raises(TypeError, match=r"'triton' has no forward-mode .*'reference'"):
        run(q)
