"""The decoder-only transformer, as an NNX module and as pure functions of a parameter pytree.

    tokens -> embedding -> L x [ x + attention(norm(x)) ; x + mlp(norm(x)) ] -> norm -> head

The module gives structure and names. Training code should use the functions: `init_params` makes
a nested dict of arrays, `apply` is pure, so `jax.jit`, `jax.grad` and `jax.vmap` (over seeds, over
learning rates) work on them as they are and no NNX transform sits in the hot path.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from models.attention import Attention
from models.config import ModelConfig
from models.layers import Embedding, Projection, RMSNorm, SwiGLU, vocabulary_logits
from models.rope import RotaryTable, positions_in_segments, rotary_table
from models.rope_scaling import scaled_frequencies
from models.sharding import constrain_activations

Params = dict[str, Any]
"""Nested dict of arrays, keyed by attribute names of `Decoder`; `blocks` leaves lead with L."""

# `pallas_flash` gives these names to what its backward pass needs of the forward pass.
SAVED_BY_ATTENTION_REMAT = ("attention_out", "attention_lse")


class Block(nnx.Module):
    """One pre-norm block: attention and SwiGLU, each on the normed residual and added to it."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.attention_norm = _norm(config)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = _norm(config)
        self.mlp = SwiGLU(config, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        rotary: RotaryTable,
        segment_ids: Int[Array, "B T"] | None = None,
        window: int | None = None,
    ) -> Float[Array, "B T D"]:
        normed = self.attention_norm(x)
        x = x + self.attention(normed, rotary=rotary, segment_ids=segment_ids, window=window)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nnx.Module):
    """Decoder-only transformer: `Decoder(config, rngs=nnx.Rngs(0))(tokens) -> logits`.

    Args:
        config: shape and policy, see `ModelConfig`.
        rngs: source of the initial parameters (stream `params`).
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = Embedding(config, rngs=rngs)
        layer_keys = jax.random.split(rngs.params(), config.num_layers)
        # One constructor mapped over keys: each parameter of the block gets a leading axis L.
        self.blocks = jax.vmap(lambda key: Block(config, rngs=nnx.Rngs(params=key)))(layer_keys)
        self.final_norm = _norm(config)
        self.head = None if config.tie_embeddings else _head(config, rngs)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Float32 logits of the token after each position.

        Args:
            tokens: integer ids in [0, V). An id outside gives NaN logits for its row.
            segment_ids: ids of the documents packed in a row, each a contiguous run. A token
                attends to its own segment only, so a packed row equals its parts run alone. A
                token of a negative id is padding: it sees nothing and nothing sees it.
            positions: RoPE positions. By default 0 .. T-1, restarted at each segment.

        Raises:
            TypeError: tokens, segment_ids or positions are not integers.
            ValueError: a shape is not `[B, T]`, or T is longer than `config.max_seq_len`.
        """
        return self.logits(self.states(tokens, segment_ids=segment_ids, positions=positions))

    def states(
        self,
        tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Final normed states, from which `logits` follow; arguments as in a call."""
        _check_ids("tokens", tokens, None)
        return self.backbone(self.embedding(tokens), segment_ids=segment_ids, positions=positions)

    def backbone(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Token vectors to final normed states: all blocks and the last norm.

        The two ends are apart so that a loss can form logits chunk by chunk, and a test can
        differentiate with respect to token vectors.
        """
        rotary = self._rotary(x.shape[:2], segment_ids, positions)
        graphdef, stack = nnx.split(self.blocks)
        x = constrain_activations(x)
        for window, start, stop in window_runs(self.config.windows):

            def step(x: Array, layer: nnx.State, window=window) -> tuple[Array, None]:
                block = nnx.merge(graphdef, layer)
                x = block(x, rotary=rotary, segment_ids=segment_ids, window=window)
                return constrain_activations(x), None

            x = self.through(_with_remat(step, self.config), x, stack, start, stop)
        return self.final_norm(x)

    def through(self, step: Callable, x: Any, stack: Any, start: int, stop: int) -> Any:
        """`x` after layers start .. stop-1 of the stack: one scan, or a loop without one.

        Args:
            step: `(x, layer) -> (x, None)`.
            x: what goes from layer to layer, a pytree.
            stack: pytree of arrays that lead with L.
            start, stop: the layers.
        """
        if not self.config.scan_layers:
            for i in range(start, stop):
                x, _ = step(x, jax.tree.map(lambda leaf, i=i: leaf[i], stack))
            return x
        if stop - start < self.config.num_layers:
            stack = jax.tree.map(lambda leaf: leaf[start:stop], stack)
        return jax.lax.scan(step, x, stack)[0]

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Final states to float32 logits, through the head or the tied embedding."""
        if self.head is None:
            return self.embedding.attend(x)
        return vocabulary_logits(x, self.head.kernel[...])

    def _rotary(
        self, shape: tuple[int, ...], segment_ids: Array | None, positions: Array | None
    ) -> RotaryTable:
        if shape[1] > self.config.max_seq_len:
            raise ValueError(
                f"the sequence has {shape[1]} tokens, more than max_seq_len="
                f"{self.config.max_seq_len}; shorten it or raise max_seq_len."
            )
        if segment_ids is not None:
            _check_ids("segment_ids", segment_ids, shape)
        if positions is not None:
            _check_ids("positions", positions, shape)
        elif segment_ids is not None:
            positions = positions_in_segments(segment_ids)
        else:
            positions = jnp.arange(shape[1], dtype=jnp.int32)[None]
        return config_rotary_table(self.config, positions, seq_len=shape[1])


def config_rotary_table(
    config: ModelConfig, positions: Int[Array, "B T"], *, seq_len: int
) -> RotaryTable:
    """The float32 cos and sin that a model of this config uses at `positions`.

    Args:
        config: its theta, rotated dims and `rope_scaling` count; its compute dtype does not.
        positions: RoPE position of each token.
        seq_len: the length that "dynamic" and "longrope" scaling choose frequencies by. A call of
            the decoder gives the T of its tokens. Decoding with a cache must keep to one length
            for all of a sequence, since cached keys were turned by its frequencies.
    """
    frequencies = scaled_frequencies(
        config.rotated_dims, config.rope_theta, config.rope_scaling, seq_len=seq_len
    )
    scaling = config.rope_scaling
    factor = 1.0 if scaling is None else scaling.cos_sin_factor
    return rotary_table(positions, frequencies, factor=factor)


def init_params(config: ModelConfig, key: Array) -> Params:
    """Fresh parameters of a decoder as a nested dict of `config.param_dtype` arrays.

    Args:
        config: the model.
        key: a typed key, `jax.random.key(seed)`. To make a stack of models for `vmap`, map
            `functools.partial(init_params, config)` over `jax.random.split(key, n)`.
    """
    _, state = nnx.split(Decoder(config, rngs=nnx.Rngs(params=key)))
    return nnx.to_pure_dict(state)


def bind(config: ModelConfig, params: Params) -> Decoder:
    """The module that `params` belong to, to call any of its methods inside a pure function."""
    return nnx.merge(_graphdef(config), params)


def apply(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    positions: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T V"]:
    """Float32 logits: `Decoder.__call__` as a pure function of the parameters.

    Compile it with the config bound: `jax.jit(functools.partial(apply, config))`.
    """
    return bind(config, params)(tokens, segment_ids=segment_ids, positions=positions)


@lru_cache(maxsize=256)
def _graphdef(config: ModelConfig) -> nnx.GraphDef[Decoder]:
    abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    return nnx.split(abstract)[0]


def window_runs(windows: tuple[int | None, ...]) -> list[tuple[int | None, int, int]]:
    """Neighbouring layers of equal window as (window, start, stop).

    >>> window_runs((4, 4, None, 4))
    [(4, 0, 2), (None, 2, 3), (4, 3, 4)]
    """
    runs, start = [], 0
    for window, layers in groupby(windows):
        stop = start + len(list(layers))
        runs.append((window, start, stop))
        start = stop
    return runs


def _head(config: ModelConfig, rngs: nnx.Rngs) -> Projection:
    shape = (config.d_model,), (config.vocab_size,)
    return Projection(*shape, param_dtype=config.param_dtype, rngs=rngs)


def _norm(config: ModelConfig) -> RMSNorm:
    return RMSNorm(config.d_model, eps=config.norm_eps, param_dtype=config.param_dtype)


def _with_remat(step: Callable, config: ModelConfig) -> Callable:
    if config.remat == "none":
        return step
    policy = None
    if config.remat == "attention":
        policy = jax.checkpoint_policies.save_only_these_names(*SAVED_BY_ATTENTION_REMAT)
    # Inside a scan the loop itself keeps XLA from merging the recomputation with the first pass.
    return jax.checkpoint(step, policy=policy, prevent_cse=not config.scan_layers)


def _check_ids(name: str, ids: Array, shape: tuple[int, ...] | None) -> None:
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got dtype {ids.dtype}.")
    if ids.ndim != 2 or (shape is not None and ids.shape != shape):
        expected = "[B, T]" if shape is None else f"[B, T] = {list(shape)}"
        raise ValueError(f"{name} must have shape {expected}, got {list(ids.shape)}.")
