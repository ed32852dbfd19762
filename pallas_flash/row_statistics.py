"""What the backward of every kernel needs to know of each query row, in base 2.

    lse2 = log2(e) LSE, +inf for a row that sees nothing, which makes its P = 2^(c S - lse2) zero
    D    = rowsum(dO * O) - dLSE, 0 for such a row

The LSE's own cotangent enters in D and nowhere else.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_flash.call import PerHead

LOG2_E = math.log2(math.e)


def row_statistics(
    out: Float[Array, "B T N Hv"],
    lse: Float[Array, "B N T"],
    dout: Float[Array, "B T N Hv"],
    dlse: Float[Array, "B N T"] | None,
    real: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B N T"], Float[Array, "B N T"]]:
    """(lse2, D), float32, in XLA: one pass over the output and its cotangent.

    Args:
      out, lse: what the forward returned.
      dout, dlse: their cotangents; dlse is None when the LSE was not used.
      real: `Mask.real_queries` of the call.
    """
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
    if real is not None:
        # dO may be NaN there, and 0 * NaN would pass it on.
        delta = jnp.where(real[:, :, None], delta, 0.0)
    delta = delta.transpose(0, 2, 1)
    if dlse is not None:
        delta -= dlse
    unseen = lse == -jnp.inf
    return jnp.where(unseen, jnp.inf, lse * LOG2_E), jnp.where(unseen, 0.0, delta)


def sink_gradient(
    sinks: PerHead, lse2: Float[Array, "B N T"], delta: Float[Array, "B N T"]
) -> PerHead:
    """A sink is a logit without a value: dP is 0, hence its gradient -sum of P D. float32."""
    p = jnp.exp2(sinks.astype(jnp.float32)[:, None] * LOG2_E - lse2)
    return -jnp.sum(p * delta, axis=(0, 2))
