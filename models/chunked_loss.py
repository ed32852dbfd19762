"""Next-token cross-entropy from final states and the head, without the logits of all tokens.

The plain loss keeps float32 logits of every token, `B·T·V·4` bytes (4 GiB for 8k tokens and 128k
words), and their gradient beside them. But the loss is one number, so the gradient of a token's
logits is known, up to one common factor, as soon as its log normaliser is:

    logits = x W,   lse_i = log Σ_v exp(logits_iv),   l_i = lse_i − logits_i[target_i] + z·lse_i²
    G_iv = w_i (softmax(logits_i)_v (1 + 2 z lse_i) − [v = target_i])
    dx = G Wᵀ,   dW = xᵀ G

A scan over chunks of tokens therefore makes `dx` and `dW` in the forward pass, with three matrix
products as the plain loss has, and the backward pass only multiplies them by the loss's cotangent.

A chunk has two levels, since its two costs differ. Adding to the float32 `dW` reads and writes all
of it, so chunks should be long; logits are float32, so few should exist. `chunk` tokens hold their
`G` in the compute dtype at once; `tile` tokens of them at a time have float32 logits.

Chunked heads: Wijmans et al. 2024 (arXiv:2411.09009) recompute logits tile by tile in a kernel;
gradients in the forward pass: Hsu et al. 2024 (arXiv:2410.10989), section 3.2.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from models.config import ModelConfig
from models.decoder import Params, bind
from models.loss import next_token_loss
from models.sharding import active_mesh

# Where the plain loss would hold more logits than these (1 GiB in float32), `decoder_loss` chunks.
LARGEST_PLAIN_LOGITS = 2**28
DEFAULT_CHUNK, DEFAULT_TILE = 512, 128


@dataclass(frozen=True)
class ChunkSizes:
    """Tokens of one step of the scan.

    Args:
        chunk: tokens whose logit gradients exist at once; `chunk·V` elements of x's dtype.
        tile: tokens whose logits exist at once, `tile·V` float32; divides `chunk`.
    """

    chunk: int = DEFAULT_CHUNK
    tile: int = DEFAULT_TILE

    def __post_init__(self) -> None:
        for name in ("chunk", "tile"):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} must be a positive int, got {size!r}.")
        if self.chunk % self.tile:
            raise ValueError(f"tile={self.tile} must divide chunk={self.chunk}.")


class _Tokens(NamedTuple):
    """What is known of each token after the scan."""

    cross_entropy: Float[Array, " M"]  # lse − target's logit; NaN for a target outside [0, V)
    lse: Float[Array, " M"]
    hit: Float[Array, " M"]  # 1 where the best logit is the target's


def decoder_loss(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    mask: Bool[Array, "B T"] | Float[Array, "B T"] | None = None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The loss of a decoder and its metrics, as `next_token_loss(apply(...))` gives them.

    `config.loss_chunk` says how: a number of tokens chunks by it, 0 never chunks, None chunks where
    the logits have more than `LARGEST_PLAIN_LOGITS` elements and no mesh is set (on a mesh each
    chunk would add up `dW` over devices). Chunked metrics carry no gradient.

    Args:
        config, params, tokens, segment_ids: as in `models.apply`.
        targets, mask: as in `next_token_loss`; `config.z_loss` is its z_loss.
    """
    decoder = bind(config, params)
    chunk = config.loss_chunk
    if chunk is None:
        large = targets.size * config.vocab_size > LARGEST_PLAIN_LOGITS
        chunk = DEFAULT_CHUNK if large and active_mesh() is None else 0
    if chunk == 0:
        logits = decoder(tokens, segment_ids=segment_ids)
        return next_token_loss(logits, targets, mask=mask, z_loss=config.z_loss)
    x = decoder.states(tokens, segment_ids=segment_ids)
    tied = decoder.head is None
    kernel = decoder.embedding.table if decoder.head is None else decoder.head.kernel
    sizes = ChunkSizes(chunk, DEFAULT_TILE if chunk % DEFAULT_TILE == 0 else chunk)
    return chunked_next_token_loss(
        x, kernel[...], targets, mask=mask, z_loss=config.z_loss, tied=tied, sizes=sizes
    )


def chunked_next_token_loss(
    x: Float[Array, "*B D"],
    kernel: Float[Array, "D V"] | Float[Array, "V D"],
    targets: Int[Array, "*B"],
    *,
    mask: Bool[Array, "*B"] | Float[Array, "*B"] | None = None,
    z_loss: float | Float[Array, ""] = 0.0,
    ignore_index: int | None = None,
    tied: bool = False,
    sizes: ChunkSizes | None = None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """`next_token_loss(x · kernel, targets, ...)` without the (tokens, V) logits.

    Products take operands in x's dtype and accumulate in float32; so do the sums of `dW` over
    chunks, which is rounded once, to the kernel's dtype. Memory beyond `dx` and the float32 `dW`:
    `chunk·V` elements of x's dtype, `tile·V` float32, and the kernel cast to x's dtype where it
    differs. Reverse mode only. A position that does not count may hold NaN.

    Args:
        x: final normed states, in the compute dtype.
        kernel: the head, (D, V), or with `tied` the token embedding, (V, D).
        targets: the token that follows each position. A target outside [0, V) makes the loss NaN
            unless its weight is 0.
        mask: bool, or non-negative weights; None counts every position.
        z_loss: coefficient of `lse²`.
        ignore_index: target id of positions that do not count, besides the mask.
        tied: the kernel is (V, D).
        sizes: tokens of a chunk; None takes the default.

    Returns:
        The loss, differentiable with respect to x, kernel, a float mask and z_loss, and the metrics
        of `next_token_loss`, which carry no gradient here.

    Raises:
        TypeError: targets are not integers, x or kernel not floating-point.
        ValueError: shapes disagree, or z_loss is negative.
    """
    _check(x, kernel, targets, mask, z_loss, tied)
    weights = jnp.ones(targets.shape) if mask is None else mask
    weights = weights.astype(jnp.float32)
    if ignore_index is not None:
        weights = jnp.where(targets == ignore_index, 0.0, weights)
    sizes, flat = ChunkSizes() if sizes is None else sizes, weights.reshape(-1)
    z = jnp.asarray(z_loss, jnp.float32)
    result: Any = _summed(
        (sizes, tied), x.reshape(-1, x.shape[-1]), kernel, targets.reshape(-1), flat, z
    )
    total, tokens = result
    weight = jnp.sum(flat)
    divisor = jnp.where(weight > 0, weight, 1.0)
    loss = total / divisor

    def mean(values: Array) -> Array:
        return _weighted(flat, values) / divisor

    metrics = {
        "loss": loss,
        "cross_entropy": mean(tokens.cross_entropy),
        "z_loss": z * mean(tokens.lse**2),
        "accuracy": mean(tokens.hit),
        "weight": weight,
    }
    return loss, jax.tree.map(jax.lax.stop_gradient, metrics)


def loss_and_gradients(
    x: Float[Array, "M D"],
    kernel: Float[Array, "D V"] | Float[Array, "V D"],
    targets: Int[Array, " M"],
    weights: Float[Array, " M"],
    *,
    z_loss: float | Float[Array, ""] = 0.0,
    tied: bool = False,
    sizes: ChunkSizes | None = None,
) -> tuple[Float[Array, ""], Float[Array, "M D"], Array]:
    """`Σ w_i l_i`, its gradient by x in x's dtype, and by the kernel in float32.

    What `chunked_next_token_loss` differentiates by, for who wants `dW` unrounded although the
    kernel is bfloat16.
    """
    _check(x, kernel, targets, weights, z_loss, tied)
    z = jnp.asarray(z_loss, jnp.float32)
    options = (ChunkSizes() if sizes is None else sizes, tied)
    tokens, dx, dw = _scan(options, x, kernel, targets, weights, z, gradients=True)
    assert dx is not None
    assert dw is not None
    return _total(tokens, weights, z), dx, dw


_Options = tuple[ChunkSizes, bool]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(
    options: _Options, x: Array, kernel: Array, targets: Array, weights: Array, z: Array
) -> tuple[Array, _Tokens]:
    tokens, _, _ = _scan(options, x, kernel, targets, weights, z, gradients=False)
    return _total(tokens, weights, z), tokens


def _forward(
    options: _Options, x: Array, kernel: Array, targets: Array, weights: Array, z: Array
) -> tuple[tuple[Array, _Tokens], Any]:
    tokens, dx, dw = _scan(options, x, kernel, targets, weights, z, gradients=True)
    # An empty array remembers the dtype that dW is rounded to.
    like = jnp.zeros((0,), kernel.dtype)
    return (_total(tokens, weights, z), tokens), (dx, dw, like, tokens, weights, z)


def _backward(options: _Options, saved: Any, cotangents: tuple[Array, _Tokens]) -> tuple:
    del options
    g, _ = cotangents  # the metrics' are zero: they end in a stop_gradient
    dx, dw, like, tokens, weights, z = saved
    losses = jnp.where(weights != 0, tokens.cross_entropy + z * tokens.lse**2, 0.0)
    return (
        (g * dx.astype(jnp.float32)).astype(dx.dtype),
        (g * dw).astype(like.dtype),
        None,
        g * losses,
        g * _weighted(weights, tokens.lse**2),
    )


_summed.defvjp(_forward, _backward)


def _total(tokens: _Tokens, weights: Array, z: Array) -> Array:
    return _weighted(weights, tokens.cross_entropy + z * tokens.lse**2)


def _weighted(weights: Array, values: Array) -> Array:
    # `where`, since 0 · NaN would let a position that does not count into the sum.
    return jnp.sum(jnp.where(weights != 0, weights * values, 0.0))


def _scan(
    options: _Options,
    x: Array,
    kernel: Array,
    targets: Array,
    weights: Array,
    z: Array,
    *,
    gradients: bool,
) -> tuple[_Tokens, Array | None, Array | None]:
    """Tokens' numbers and, if asked for, the gradients of `Σ w_i l_i` by x and by the kernel."""
    (sizes, tied), count = options, x.shape[0]
    low = kernel.astype(x.dtype)
    chunk = min(sizes.chunk, -(-count // sizes.tile) * sizes.tile)
    short = -count % max(chunk, 1)
    if short:
        # Rows of weight 0 count for nothing.
        x = jnp.pad(x, ((0, short), (0, 0)))
        targets, weights = jnp.pad(targets, (0, short)), jnp.pad(weights, (0, short))
    x = jnp.where(weights[:, None] != 0, x, 0)
    parts = (x, targets, weights)
    parts = jax.tree.map(lambda a: a.reshape(-1, chunk, *a.shape[1:]), parts)

    def step(dw: Array | None, part: tuple) -> tuple[Array | None, tuple]:
        tiles = jax.tree.map(lambda a: a.reshape(-1, sizes.tile, *a.shape[1:]), part)
        make = functools.partial(_tile, low=low, z=z, tied=tied, gradients=gradients)
        tokens, dlogits = jax.lax.map(lambda tile: make(*tile), tiles)
        if dw is None:
            return None, (tokens, None)
        dlogits = dlogits.reshape(chunk, -1)
        dx = _product("nv,vd->nd" if tied else "nv,dv->nd", dlogits, low)
        dw += _product("nv,nd->vd" if tied else "nd,nv->dv", *_in_order(tied, dlogits, part[0]))
        return dw, (tokens, dx.astype(x.dtype))

    start = jnp.zeros(kernel.shape, jnp.float32) if gradients else None
    dw, (tokens, dx) = jax.lax.scan(step, start, parts)
    tokens = jax.tree.map(lambda a: a.reshape(-1)[:count], tokens)
    return tokens, None if dx is None else dx.reshape(-1, x.shape[1])[:count], dw


def _tile(
    x: Array, targets: Array, weights: Array, *, low: Array, z: Array, tied: bool, gradients: bool
) -> tuple[_Tokens, Array | None]:
    """One tile's logits: what its tokens lose, and the gradient of that by the logits."""
    logits = _product("nd,vd->nv" if tied else "nd,dv->nv", x, low)
    vocab_size = logits.shape[1]
    known = (targets >= 0) & (targets < vocab_size)
    at_target = jnp.take_along_axis(logits, jnp.where(known, targets, 0)[:, None], axis=1)[:, 0]
    lse = jax.nn.logsumexp(logits, axis=1)
    hit = (jnp.argmax(logits, axis=1) == targets).astype(jnp.float32)
    tokens = _Tokens(lse - jnp.where(known, at_target, jnp.nan), lse, hit)
    if not gradients:
        return tokens, None
    p = jnp.exp(logits - lse[:, None]) * (1 + 2 * z * lse)[:, None]
    is_target = jnp.arange(vocab_size) == targets[:, None]
    return tokens, (weights[:, None] * (p - is_target)).astype(x.dtype)


def _product(subscripts: str, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _in_order(tied: bool, dlogits: Array, x: Array) -> tuple[Array, Array]:
    return (dlogits, x) if tied else (x, dlogits)


def _check(
    x: Array, kernel: Array, targets: Array, mask: Array | None, z_loss: Any, tied: bool
) -> None:
    for name, array in (("x", x), ("kernel", kernel)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name} must be floating-point, got dtype {array.dtype}.")
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise TypeError(f"targets must be integer token ids, got dtype {targets.dtype}.")
    if kernel.ndim != 2 or kernel.shape[1 if tied else 0] != x.shape[-1]:
        expected = "(V, D)" if tied else "(D, V)"
        raise ValueError(
            f"kernel must have shape {expected} with D = {x.shape[-1]}, as x has, for "
            f"tied={tied}, got {list(kernel.shape)}."
        )
    for name, array in (("targets", targets), ("mask", mask)):
        if array is not None and array.shape != x.shape[:-1]:
            raise ValueError(
                f"{name} must have the shape of x without its last axis, "
                f"{list(x.shape[:-1])}, got {list(array.shape)}."
            )
    if isinstance(z_loss, int | float) and z_loss < 0:
        raise ValueError(f"z_loss must be at least 0, got {z_loss}.")
