"""Initial scale, norm statistics and the embedding's behaviour at bad ids."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import ModelConfig
from models.layers import Embedding, Projection, RMSNorm, SwiGLU

CONFIG = ModelConfig(
    vocab_size=96,
    num_layers=8,
    d_model=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    ffn_dim=256,
    max_seq_len=16,
)


@pytest.fixture(scope="module")
def mlp() -> SwiGLU:
    return SwiGLU(CONFIG, rngs=nnx.Rngs(0))


def _std(kernel: nnx.Param) -> float:
    return float(np.std(np.asarray(kernel[...], np.float64)))


def test_kernels_have_the_documented_standard_deviation(mlp: SwiGLU):
    """Sampling error of a standard deviation over n draws is about 1 / sqrt(2 n): 0.4% here."""
    assert _std(mlp.gate.kernel) == pytest.approx(1 / math.sqrt(128), rel=0.02)
    assert _std(mlp.up.kernel) == pytest.approx(1 / math.sqrt(128), rel=0.02)
    assert _std(mlp.down.kernel) == pytest.approx(1 / math.sqrt(256 * 2 * 8), rel=0.02)
    embedding = Embedding(CONFIG, rngs=nnx.Rngs(0))
    assert _std(embedding.table) == pytest.approx(1 / math.sqrt(128), rel=0.02)
    fan_in = 4 * 32
    output = Projection((4, 32), (96,), param_dtype="float32", rngs=nnx.Rngs(1))
    assert _std(output.kernel) == pytest.approx(1 / math.sqrt(fan_in), rel=0.02)
    bound = 2 / 0.8796 / math.sqrt(fan_in)
    assert float(jnp.abs(output.kernel[...]).max()) < bound, "cut at two standard deviations"


def test_kernels_are_drawn_apart(mlp: SwiGLU):
    assert not np.allclose(mlp.gate.kernel[...], mlp.up.kernel[...])


def test_projection_contracts_the_named_axes():
    x = jax.random.normal(jax.random.key(0), (2, 3, 4, 8))
    project = Projection((4, 8), (5, 6), param_dtype="float32", rngs=nnx.Rngs(0))
    want = np.einsum("btnh,nhcd->btcd", x, project.kernel[...])
    np.testing.assert_allclose(project(x), want, atol=1e-5)


def test_rms_norm_is_in_float32():
    norm = RMSNorm(64, eps=1e-5, param_dtype="float32")
    x = jax.random.normal(jax.random.key(0), (3, 64), jnp.bfloat16) * 1e4
    y = norm(x)
    assert y.dtype == jnp.bfloat16
    exact = np.asarray(x, np.float64)
    exact /= np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2**-8)


def test_rms_norm_of_zeros_is_zero_with_finite_gradient():
    norm = RMSNorm(8, eps=1e-5, param_dtype="float32")
    value, grad = jax.value_and_grad(lambda x: norm(x).sum())(jnp.zeros((1, 8)))
    assert float(value) == 0.0
    assert bool(jnp.isfinite(grad).all())


@pytest.mark.parametrize("bad_id", [-1, 96, 1000])
def test_unknown_token_is_nan_not_a_neighbour(bad_id: int):
    embedding = Embedding(CONFIG, rngs=nnx.Rngs(0))
    rows = embedding(jnp.array([[3, bad_id]]))
    assert bool(jnp.isnan(rows[0, 1]).all())
    np.testing.assert_array_equal(rows[0, 0], embedding.table[...][3].astype(jnp.bfloat16))
