"""Layers that know nothing of each other: norm, projection, MLP, token embedding.

Initialisation, in one place. Every matrix is drawn from a normal truncated at two standard
deviations and rescaled so that the standard deviation is what is asked for:

* a projection: 1 / sqrt(fan_in), so that unit-variance input gives unit-variance output;
* a projection that writes to the residual stream (attention output, MLP down): a further
  1 / sqrt(2 L), because 2 L of them add up there (GPT-2, Radford et al. 2019, section 2.3);
* token embedding and head: 1 / sqrt(D), which makes logits of a normed state unit-variance,
  tied or not;
* norm scales: 1; biases: 0.

Parameters are stored in `param_dtype` and cast to the dtype of the activations where they are
used, so the compute dtype is set by whoever makes the activations: the embedding.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from models.config import ModelConfig
from models.sharding import constrain_table


def _truncated_normal(
    rngs: nnx.Rngs, shape: tuple[int, ...], *, fan_in: int, gain: float, dtype: str
) -> jax.Array:
    # The variance of a unit normal cut at ±2 is 0.7737...; dividing it out restores the asked one.
    cut_std = 0.87962566103423978
    # Drawn flat: under the vmap over layers XLA takes five times as long to compile random bits
    # of a shape with several axes.
    draw = jax.random.truncated_normal(rngs.params(), -2.0, 2.0, (math.prod(shape),), jnp.float32)
    return (draw * (gain / (cut_std * math.sqrt(fan_in)))).astype(dtype).reshape(shape)


class RMSNorm(nnx.Module):
    """`x / sqrt(mean(x²) + eps) · scale` over the last axis, in float32, back in x's dtype.

    Zhang & Sennrich (arXiv:1910.07467), eq. 4.
    """

    def __init__(self, size: int, *, eps: float, param_dtype: str):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((size,), param_dtype))

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        y = x.astype(jnp.float32)
        inverse_rms = jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * inverse_rms * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class Projection(nnx.Module):
    """A linear map between groups of axes: kernel shape `(*inputs, *outputs)`.

    `Projection((D,), (N, H))` maps `[..., D]` to `[..., N, H]`; `Projection((N, H), (D,))` maps
    it back. Heads stay an axis of the kernel, so that sharding and checkpoints can name it.

    Args:
        inputs: sizes of the axes that are contracted, the last ones of the argument.
        outputs: sizes of the axes that replace them.
        gain: standard deviation of the output for unit-variance input, at initialisation.
        bias: add a vector of shape `outputs`.
    """

    def __init__(
        self,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        *,
        param_dtype: str,
        rngs: nnx.Rngs,
        gain: float = 1.0,
        bias: bool = False,
    ):
        self.num_inputs = len(inputs)
        self.kernel = nnx.Param(
            _truncated_normal(
                rngs, (*inputs, *outputs), fan_in=math.prod(inputs), gain=gain, dtype=param_dtype
            )
        )
        self.bias = nnx.Param(jnp.zeros(outputs, param_dtype)) if bias else None

    def __call__(self, x: Float[Array, "*B inputs"]) -> Float[Array, "*B outputs"]:
        y = jnp.tensordot(x, self.kernel[...].astype(x.dtype), axes=self.num_inputs)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)


class SwiGLU(nnx.Module):
    """`down(silu(gate(x)) · up(x))`: Shazeer (arXiv:2002.05202), eq. 6, without biases."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        model, hidden, dtype = (config.d_model,), (config.ffn_dim,), config.param_dtype
        self.gate = Projection(model, hidden, param_dtype=dtype, rngs=rngs)
        self.up = Projection(model, hidden, param_dtype=dtype, rngs=rngs)
        self.down = Projection(
            hidden, model, param_dtype=dtype, rngs=rngs, gain=residual_gain(config)
        )

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Embedding(nnx.Module):
    """The table of token vectors `[V, D]`: looked up on the way in, and as a head when tied."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.compute_dtype = config.compute_dtype
        self.table = nnx.Param(
            _truncated_normal(
                rngs,
                (config.vocab_size, config.d_model),
                fan_in=config.d_model,
                gain=1.0,
                dtype=config.param_dtype,
            )
        )

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Rows of the table in the compute dtype; a token outside [0, V) gives a row of NaN.

        A traced token cannot raise, and the nearest row would be a wrong answer that looks right.
        """
        rows = (
            constrain_table(self.table[...])
            .at[tokens]
            .get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        )
        return rows.astype(self.compute_dtype)

    def attend(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Float32 logits `x · tableᵀ`."""
        return vocabulary_logits(x, self.table[...].T)


def vocabulary_logits(
    x: Float[Array, "B T D"], kernel: Float[Array, "D V"]
) -> Float[Array, "B T V"]:
    """`x · kernel` with operands in x's dtype, accumulated and returned in float32."""
    return jnp.einsum("btd,dv->btv", x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)


def residual_gain(config: ModelConfig) -> float:
    """1 / sqrt(2 L): the scale of each of the 2 L terms that add up in the residual stream."""
    return 1.0 / math.sqrt(2 * config.num_layers)
