"""Grouped-query self-attention around `pallas_flash.dot_product_attention`."""

from flax import nnx
from jaxtyping import Array, Float, Int

from models.config import ModelConfig
from models.layers import Projection, RMSNorm, residual_gain
from models.rope import RotaryTable, apply_rotary
from models.sharded_attention import attention


class Attention(nnx.Module):
    """Causal self-attention of one block: project, (norm,) rotate, attend, project back.

    Query head n reads key/value head n // (N / K). With QK-norm (Henry et al., arXiv:2010.04245;
    as in Qwen-3 and OLMo 2) queries and keys are RMS-normalised over the head dim before RoPE.
    With `qkv_bias` (as in Qwen-2.5) the three input projections add a bias, the output does not.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.implementation = config.attention_implementation
        dtype = config.param_dtype
        model = (config.d_model,)
        heads = (config.num_heads, config.head_dim)
        kv_heads = (config.num_kv_heads, config.head_dim)
        bias = config.qkv_bias
        self.query = Projection(model, heads, param_dtype=dtype, rngs=rngs, bias=bias)
        self.key = Projection(model, kv_heads, param_dtype=dtype, rngs=rngs, bias=bias)
        self.value = Projection(model, kv_heads, param_dtype=dtype, rngs=rngs, bias=bias)
        self.output = Projection(
            heads, model, param_dtype=dtype, rngs=rngs, gain=residual_gain(config)
        )
        self.query_norm = self._head_norm(config)
        self.key_norm = self._head_norm(config)

    @staticmethod
    def _head_norm(config: ModelConfig) -> RMSNorm | None:
        if not config.qk_norm:
            return None
        return RMSNorm(config.head_dim, eps=config.norm_eps, param_dtype=config.param_dtype)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        rotary: RotaryTable,
        segment_ids: Int[Array, "B T"] | None = None,
        window: int | None = None,
    ) -> Float[Array, "B T D"]:
        """Attention over `x`; a window leaves each query that many keys, its own included."""
        query, key, value = self.heads(x, rotary)
        attended = attention(
            query,
            key,
            value,
            is_causal=True,
            local_window_size=None if window is None else (window - 1, 0),
            segment_ids=segment_ids,
            implementation=self.implementation,
        )
        return self.output(attended)

    def heads(
        self, x: Float[Array, "B T D"], rotary: RotaryTable
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Queries and keys, turned to their positions, and values: what attention is between."""
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        return apply_rotary(query, rotary), apply_rotary(key, rotary), value
