"""What one attention call is, and what an implementation must offer to serve it.

`api.py` checks the user's arguments once and turns them into an `AttentionCall`; every
implementation then receives the same object. An implementation is a module with

    NAME: str                                   the name users choose it by
    unsupported(call, platform) -> str | None   why it cannot serve the call, None when it can;
                                                the text names the argument and what would work
    forward(call) -> (out, lse)                 out (B, T, N, Hv) in the query's dtype,
                                                lse (B, N, T) float32 (float64 for float64)
    backward(call, out, lse, dout, dlse, wanted) -> Gradients

`pallas_flash.vjp` wraps the pair into one `jax.custom_vjp` that saves only `out` and `lse`, names
both for `jax.checkpoint` policies and folds vmapped axes into the batch, so an implementation does
none of that. In `backward`, `dlse` is the cotangent of `lse` or None when the LSE was not used, and
`wanted` holds the names of the `Gradients` fields that are asked for (the others may be None).

The maths, for batch row b, query head n and key/value head n // G:

    logits = mod(scale * q k^T + bias - slope |i' - j|),  then  cap * tanh(logits / cap)
    lse    = log(sum_j visible exp(logits) + exp(sink))
    out    = sum_j visible dropout(exp(logits - lse)) v_j
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import jax
from jaxtyping import Array, Float, UInt32

from pallas_flash.mask import Mask
from pallas_flash.mods import Mod

if TYPE_CHECKING:  # a type checker takes a one-letter shape string for a variable
    PerHead = Array
else:
    PerHead = Float[Array, "N"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """Checked arguments of one attention call; a pytree whose arrays are leaves.

    Attributes:
      query, key, value: (B, T, N, H), (B, S, K, H) and (B, S, K, Hv), one floating dtype.
      bias: (B|1, N|1, T|1, S|1), natural-log units, any floating dtype, or None.
      mask: every mask of the call.
      static_scale: the factor of q k^T when it is a Python number.
      traced_scale: the same as a scalar array, when the caller gave an array; then
        `static_scale` is None.
      soft_cap: bound of the logits, or None.
      sinks: (N,) logits that join the denominator, or None.
      alibi_slopes: (N,), or None.
      score_mod: traced user function (score, b, n, q_index, k_index) -> score, or None.
      dropout_rate: probability of dropping, 0 for none.
      dropout_seed: uint32 (2,), None iff the rate is 0.
      deterministic: promise bitwise repeatable gradients.
    """

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K Hv"]
    bias: Float[Array, "#B #N #T #S"] | None = None
    mask: Mask = dataclasses.field(default_factory=Mask)
    static_scale: float | None = dataclasses.field(default=None, metadata={"static": True})
    traced_scale: Float[Array, ""] | None = None
    soft_cap: float | None = dataclasses.field(default=None, metadata={"static": True})
    sinks: PerHead | None = None
    alibi_slopes: PerHead | None = None
    score_mod: Mod | None = None
    dropout_rate: float = dataclasses.field(default=0.0, metadata={"static": True})
    dropout_seed: UInt32[Array, 2] | None = None
    deterministic: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def scale(self) -> float | Float[Array, ""]:
        """The factor of q k^T, static where possible."""
        if self.traced_scale is not None:
            return self.traced_scale
        assert self.static_scale is not None
        return self.static_scale

    @property
    def sizes(self) -> Sizes:
        batch, queries, heads, head_dim = self.query.shape
        _, keys, kv_heads, value_dim = self.value.shape
        return Sizes(batch, queries, keys, heads, kv_heads, head_dim, value_dim)


class Sizes(NamedTuple):
    """Sizes of a call, named by the letters of the shape legend."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    Hv: int

    @property
    def G(self) -> int:
        """Query heads per key/value head: query head n reads key/value head n // G."""
        return self.N // self.K


class Gradients(NamedTuple):
    """Cotangents of an `AttentionCall`'s differentiable fields, each in its field's shape.

    `None` is zero (or: was not wanted). `score_mod` is a tuple, one for each captured array.
    """

    query: Array | None = None
    key: Array | None = None
    value: Array | None = None
    bias: Array | None = None
    traced_scale: Array | None = None
    sinks: Array | None = None
    alibi_slopes: Array | None = None
    score_mod: tuple[Array | None, ...] | None = None


def beyond_foundation(call: AttentionCall) -> str | None:
    """Name of the first argument in use beyond q, k, v, bias, static scale, plain masks; or None.

    For implementations that serve the plain call only: return this from `unsupported`.
    """
    in_use = {
        "scale (as an array)": call.traced_scale is not None,
        "logits_soft_cap": call.soft_cap is not None,
        "sinks": call.sinks is not None,
        "alibi_slopes": call.alibi_slopes is not None,
        "score_mod": call.score_mod is not None,
        "dropout_rate": call.dropout_rate > 0,
        "query_segment_ids": call.mask.has_segments,
        "query_positions or key_value_positions": call.mask.has_positions,
        "mask_mod": call.mask.mask_mod is not None,
    }
    return next((name for name, used in in_use.items() if used), None)
