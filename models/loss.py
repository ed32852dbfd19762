"""Next-token cross-entropy with optional z-loss, as a weighted mean over tokens."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def next_token_loss(
    logits: Float[Array, "*B V"],
    targets: Int[Array, "*B"],
    *,
    mask: Bool[Array, "*B"] | Float[Array, "*B"] | None = None,
    z_loss: float = 0.0,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Mean of `lse - logits[target] + z_loss · lse²` over the tokens that count, in float32.

    `lse = logsumexp(logits)` over V. With weights `w` (the mask), the mean is `Σ w·l / Σ w`: each
    token counts the same however tokens are spread over rows. To accumulate over microbatches
    without bias, add up `loss · weight` and divide by the sum of `weight`. The z term keeps the
    softmax normaliser near 1 (PaLM, arXiv:2204.02311, section 5).

    Args:
        logits: scores of the next token at each position, any float dtype.
        targets: the token that follows each position, already shifted. A target outside [0, V)
            makes the loss NaN unless its weight is 0; give `mask=targets != ignore_id` for a
            data set that marks such positions.
        mask: bool, or non-negative weights; None counts every position.
        z_loss: coefficient of the squared log normaliser.

    Returns:
        The loss, and float32 scalars: `loss` itself, `cross_entropy` (nats a token) and `z_loss`
        (its addends), `accuracy` (share of tokens whose best logit is the target), `weight`
        (Σ w; with 0 every mean is 0).

    Raises:
        TypeError: targets are not integers, or logits are not floating-point.
        ValueError: shapes disagree, or z_loss is negative.
    """
    _check(logits, targets, mask, z_loss)
    logits = logits.astype(jnp.float32)
    vocab_size = logits.shape[-1]
    known = (targets >= 0) & (targets < vocab_size)
    index = jnp.where(known, targets, 0)
    target_logits = jnp.take_along_axis(logits, index[..., None], axis=-1)[..., 0]
    target_logits = jnp.where(known, target_logits, jnp.nan)
    lse = jax.nn.logsumexp(logits, axis=-1)

    weights = jnp.ones(targets.shape) if mask is None else mask
    weights = weights.astype(jnp.float32)
    weight = jnp.sum(weights)
    per_token = weights / jnp.where(weight > 0, weight, 1.0)

    def mean(values: Array) -> Array:
        # `where`, since 0 · NaN would let a position that does not count into the sum.
        return jnp.sum(jnp.where(per_token != 0, per_token * values, 0.0))

    cross_entropy = mean(lse - target_logits)
    z_term = z_loss * mean(lse * lse)
    loss = cross_entropy + z_term
    hits = (jnp.argmax(logits, axis=-1) == targets).astype(jnp.float32)
    metrics = {
        "loss": loss,
        "cross_entropy": cross_entropy,
        "z_loss": z_term,
        "accuracy": mean(hits),
        "weight": weight,
    }
    return loss, metrics


def _check(logits: Array, targets: Array, mask: Array | None, z_loss: float) -> None:
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"logits must be floating-point, got dtype {logits.dtype}.")
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise TypeError(f"targets must be integer token ids, got dtype {targets.dtype}.")
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"targets must have the shape of logits without its last axis, "
            f"{list(logits.shape[:-1])}, got {list(targets.shape)}."
        )
    if mask is not None and mask.shape != targets.shape:
        raise ValueError(
            f"mask must have the shape of targets, {list(targets.shape)}, got {list(mask.shape)}."
        )
    if isinstance(z_loss, int | float) and z_loss < 0:
        raise ValueError(f"z_loss must be at least 0, got {z_loss}.")
