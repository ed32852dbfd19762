"""The Triton kernels compiled on a GPU, against the float32 reference at sizes that models run."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_flash import reference, vjp
from pallas_flash.call import AttentionCall
from pallas_flash.mask import Mask
from pallas_flash.triton.attention import Kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*Triton.*:DeprecationWarning"),
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA GPU"),
]

COMPILED = functools.partial(vjp.attention, Kernels(interpret=False))
# Largest error over the largest value of each array, against float32 on the same inputs.
TOLERANCE = {"bfloat16": 1.5e-2, "float16": 3e-3, "float32": 1e-5}
MASKS = {
    "full": Mask(),
    "causal": Mask(is_causal=True),
    "causal window": Mask(is_causal=True, window=(200, None)),
    "window": Mask(window=(100, 300)),
    "bottom right": Mask(is_causal=True, causal_alignment="bottom_right"),
}


def random_call(*, B=1, T=1024, S=None, N=4, K=2, H=64, Hv=None, dtype="bfloat16", **fields):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    return AttentionCall(
        query=normal(B, T, N, H),
        key=normal(B, S or T, K, H),
        value=normal(B, S or T, K, Hv or H),
        static_scale=H**-0.5,
        **fields,
    )


def outcome(call, run):
    """Output, LSE and gradients of a call, float32."""
    names = [name for name in ("query", "key", "value", "bias") if getattr(call, name) is not None]

    def loss(arrays):
        out, lse = run(dataclasses.replace(call, **arrays))
        # Rounded, so that runs in every dtype see the same cotangent; a cast to bfloat16 and back
        # would be dropped where XLA may keep excess precision.
        weights = lax.reduce_precision(jnp.cos(jnp.arange(out.size, dtype=jnp.float32)), 8, 7)
        total = jnp.sum(out.astype(jnp.float32) * weights.reshape(out.shape))
        return total + jnp.sum(jnp.where(lse == -jnp.inf, 0, lse)), (out, lse)

    arrays = {name: getattr(call, name) for name in names}
    grads, (out, lse) = jax.jit(jax.grad(loss, has_aux=True))(arrays)
    return {
        name: np.asarray(x, np.float32) for name, x in {"out": out, "lse": lse, **grads}.items()
    }


def check(call, *, tolerance=None):
    got = outcome(call, COMPILED)
    exact = jax.tree.map(
        lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, call
    )
    want = outcome(exact, reference.forward)
    tolerance = tolerance or TOLERANCE[call.query.dtype.name]
    for name, expected in want.items():
        infinite = np.isinf(expected)
        np.testing.assert_array_equal(got[name][infinite], expected[infinite], err_msg=name)
        error = np.abs(got[name][~infinite] - expected[~infinite]).max(initial=0)
        allowed = tolerance * np.abs(expected[~infinite]).max(initial=1e-30)
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("length", [1024, 4096])
@pytest.mark.parametrize("mask", MASKS)
def test_masks_and_lengths(mask, length, head_dim):
    check(random_call(T=length, H=head_dim, mask=MASKS[mask]))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [16, 64, 72, 96, 128, 256])
def test_head_dims_and_dtypes(head_dim, dtype):
    check(random_call(T=512, H=head_dim, dtype=dtype, mask=MASKS["causal"]))


@pytest.mark.parametrize(("N", "K"), [(8, 8), (8, 2), (8, 1), (6, 2)])
def test_head_groups(N, K):
    check(random_call(T=1024, N=N, K=K, H=128, mask=MASKS["causal"]))


@pytest.mark.parametrize(
    ("T", "S"), [(1, 1), (1, 1000), (37, 53), (1023, 1025), (2049, 300), (300, 2049)]
)
@pytest.mark.parametrize("mask", ["full", "causal", "bottom right"])
def test_any_size(mask, T, S):
    check(random_call(B=2, T=T, S=S, H=64, mask=MASKS[mask]))


def test_value_head_dim_of_its_own():
    check(random_call(H=128, Hv=64, mask=MASKS["causal"]))


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_poison_behind_lengths_never_leaks(alignment):
    mask = Mask(
        is_causal=True,
        causal_alignment=alignment,
        query_lengths=jnp.array([700, 0, 1000, 129]),
        key_value_lengths=jnp.array([500, 900, 0, 128]),
    )
    call = random_call(B=4, T=1000, H=128, mask=mask)

    def poison(array, lengths):
        hidden = np.arange(array.shape[1])[None, :] >= np.asarray(lengths)[:, None]
        return jnp.where(hidden[:, :, None, None], jnp.nan, array)

    check(
        dataclasses.replace(
            call,
            query=poison(call.query, mask.query_lengths),
            key=poison(call.key, mask.key_value_lengths),
            value=poison(call.value, mask.key_value_lengths),
        )
    )


@pytest.mark.parametrize("shape", [(2, 4, 500, 700), (1, 4, 500, 1), (2, 1, 1, 700), (1, 1, 1, 1)])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_bias_and_its_gradient(mask, shape):
    bias = jax.random.normal(jax.random.key(1), shape, jnp.float32)
    call = random_call(B=2, T=500, S=700, dtype="float32", bias=bias, mask=MASKS[mask])
    check(call, tolerance=3e-5)


@pytest.mark.parametrize("shape", [(2, 4, 500, 700), (1, 4, 500, 1), (2, 1, 1, 700)])
def test_dense_mask(shape):
    dense = jax.random.bernoulli(jax.random.key(1), 0.5, shape)
    check(random_call(B=2, T=500, S=700, mask=Mask(is_causal=True, dense=dense)))


def test_gradients_are_the_same_bit_for_bit_every_time():
    call = random_call(B=2, T=2048, N=8, K=2, H=128, mask=MASKS["causal"])
    first, second = outcome(call, COMPILED), outcome(call, COMPILED)
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def test_memory_of_the_backward_pass_is_linear_in_the_sequence():
    def temporaries(length):
        call = random_call(T=length, N=4, K=2, H=64, mask=MASKS["causal"])

        def backward(call):
            return jax.grad(lambda call: jnp.sum(COMPILED(call)[0]))(call)

        analysis = jax.jit(backward).lower(call).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    short, long = temporaries(4096), temporaries(16384)
    assert long <= 4.5 * short
