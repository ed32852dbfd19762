"""The Triton kernels compiled on a GPU, against the float32 reference at sizes that models run."""

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_flash import block_mask, reference, vjp
from pallas_flash.call import AttentionCall, Gradients
from pallas_flash.mask import Mask
from pallas_flash.mods import INDICES, Mod
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
        **{"static_scale": H**-0.5, **fields},
    )


def outcome(call, run):
    """Output, LSE and gradients of a call, float32."""
    names = [name for name in Gradients._fields if getattr(call, name) is not None]

    def loss(arrays):
        out, lse = run(dataclasses.replace(call, **arrays))
        # Rounded, so that runs in every dtype see the same cotangent; a cast to bfloat16 and back
        # would be dropped where XLA may keep excess precision.
        weights = lax.reduce_precision(jnp.cos(jnp.arange(out.size, dtype=jnp.float32)), 8, 7)
        total = jnp.sum(out.astype(jnp.float32) * weights.reshape(out.shape))
        return total + jnp.sum(jnp.where(lse == -jnp.inf, 0, lse)), (out, lse)

    arrays = {name: getattr(call, name) for name in names}
    grads, (out, lse) = jax.jit(jax.grad(loss, has_aux=True))(arrays)
    if "score_mod" in grads:
        grads["score_mod"] = jnp.concatenate([x.ravel() for x in grads["score_mod"].captured])
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


# ---- every further argument ---------------------------------------------------------------------

T, S = 300, 430
TABLE = jnp.sin(jnp.arange(4 * 11.0)).reshape(4, 11)
PER_HEAD = jnp.array([0.5, -0.3, 2.0, 0.01])


def ids(size):
    """Two rows of packed documents, the second one padded at its end."""
    row = jnp.arange(size) // 90
    return jnp.stack([row, jnp.where(jnp.arange(size) < size - 40, row // 2, -1)]).astype(jnp.int32)


def by_distance(score, b, n, i, j):
    """Reads a captured array by element and as a scalar; has a branch and its own derivative."""
    near = lax.cond(i - j < 5, lambda: 1.0, lambda: 0.5)
    table = TABLE[n, jnp.clip(i - j + 5, 0, 10)] * (b + 1)
    return score + jax.nn.relu(score) * TABLE[0, 3] * near + table


def documents(b, n, i, j):
    return (i // 64 == j // 64) | (TABLE[n, j % 11] > 0.5)


SEGMENTS: dict[str, Any] = {"query_segment_ids": ids(T), "key_value_segment_ids": ids(S)}
STAIRS = block_mask(lambda b, n, i, j: (i // 64 == j // 64) | (j < 5), T=T, S=S)
FEATURES: dict[str, dict[str, Any]] = {
    "segments": {"mask": Mask(**SEGMENTS)},
    "packed causal": {
        "mask": Mask(is_causal=True, window=(50, None), **SEGMENTS,
                     query_positions=jnp.tile(jnp.arange(T) % 90, (2, 1)),
                     key_value_positions=jnp.tile(jnp.arange(S) % 90, (2, 1))),
    },
    "positions": {
        "mask": Mask(is_causal=True, query_positions=jnp.stack([jnp.arange(T) + 99,
                                                                jnp.arange(T)[::-1]])),
        "alibi_slopes": jnp.abs(PER_HEAD) / 8,
    },
    "soft cap": {"soft_cap": 2.0, "mask": MASKS["causal"]},
    "sinks": {"sinks": PER_HEAD, "mask": Mask(window=(4, 0), key_value_lengths=jnp.array([9, 0]))},
    "alibi": {"alibi_slopes": jnp.abs(PER_HEAD) / 8, "mask": MASKS["bottom right"]},
    "traced scale": {"static_scale": None, "traced_scale": jnp.float32(0.3)},
    "dropout": {"dropout_rate": 0.3, "dropout_seed": jnp.array([7, 2**31 + 5], jnp.uint32)},
    "score_mod": {"score_mod": Mod.trace("score_mod", by_distance, jnp.float32, *INDICES)},
    "mask_mod": {"mask": Mask(mask_mod=Mod.trace("mask_mod", documents, *INDICES))},
    "block mask": {"mask": Mask(mask_mod=STAIRS.mod, blocks=STAIRS)},
}  # fmt: skip
FEATURES["everything"] = {
    **FEATURES["dropout"], **FEATURES["score_mod"], **FEATURES["traced scale"], "soft_cap": 3.0,
    "sinks": PER_HEAD, "alibi_slopes": jnp.abs(PER_HEAD) / 8,
    "bias": jnp.where(jnp.arange(S) % 7 == 0, -jnp.inf, jnp.cos(jnp.arange(S)))[None, None, None],
    "mask": Mask(is_causal=True, **SEGMENTS, mask_mod=FEATURES["mask_mod"]["mask"].mask_mod,
                 key_value_lengths=jnp.array([400, 333])),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("feature", FEATURES)
def test_every_argument(feature, dtype):
    call = random_call(B=2, T=T, S=S, dtype=dtype, **FEATURES[feature])
    check(call, tolerance=3e-5 if dtype == "float32" else 3e-2)


def test_poison_in_padding_segments_never_leaks():
    call = random_call(B=2, T=T, S=S, dtype="float32", sinks=PER_HEAD, mask=Mask(**SEGMENTS))

    def poison(array, ids):
        return jnp.where((ids < 0)[:, :, None, None], jnp.nan, array)

    check(
        dataclasses.replace(
            call,
            query=poison(call.query, ids(T)),
            key=poison(call.key, ids(S)),
            value=poison(call.value, ids(S)),
        ),
        tolerance=3e-5,
    )


def test_skipped_segments_cost_nothing():
    """Thirty-two documents of 512 take far less time than one of 16,384."""

    def milliseconds(document):
        ids = (jnp.arange(16384) // document)[None]
        mask = Mask(query_segment_ids=ids, key_value_segment_ids=ids)
        call = random_call(T=16384, N=8, K=8, mask=mask)

        def loss(arrays):
            return jnp.sum(COMPILED(dataclasses.replace(call, **arrays))[0].astype(jnp.float32))

        step = jax.jit(jax.grad(loss))
        arrays = {"query": call.query, "key": call.key, "value": call.value}
        jax.block_until_ready(step(arrays))
        times = []
        for _ in range(5):
            start = time.perf_counter()
            jax.block_until_ready(step(arrays))
            times.append(time.perf_counter() - start)
        return 1e3 * min(times)

    assert 4 * milliseconds(512) < milliseconds(16384)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_errors_are_at_most_twice_those_of_dense_attention_in_that_dtype(dtype):
    call = random_call(T=512, N=2, K=2, H=64, dtype=dtype, mask=MASKS["causal"])

    def dense(call):
        q, k, v = call.query, call.key, call.value
        logits = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
        visible = jnp.tril(jnp.ones((512, 512), bool))
        logits = jnp.where(visible, logits * call.static_scale, -jnp.inf)
        lse = jax.nn.logsumexp(logits, axis=-1)
        p = jnp.exp(logits - lse[..., None]).astype(q.dtype)
        return jnp.einsum("bnts,bsnh->btnh", p, v).astype(q.dtype), lse

    exact = jax.tree.map(lambda x: x.astype(jnp.float32), call)
    want, ours, theirs = (
        outcome(exact, reference.forward), outcome(call, COMPILED), outcome(call, dense),
    )  # fmt: skip
    for name in ("out", "query", "key", "value"):
        error, allowed = (np.abs(got[name] - want[name]).max() for got in (ours, theirs))
        assert error <= 2 * allowed, f"{name}: error {error:.2e}, dense {allowed:.2e}"


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
