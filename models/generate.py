"""Text generation: prompts of any lengths in one batch, two compiled programs.

    prefill   all prompts at once   -> cache, first token of each row
    decode    one token a row       -> cache, next token of each row

Shapes are rounded up to buckets, so that a run compiles each program once and later runs of
similar lengths compile nothing. The next step is dispatched before the last one's tokens are read,
so the device does not wait for the host.

    generator = Generator(config, params)
    for event in generator.stream([Request(prompt=(1, 2, 3), max_new_tokens=16)]): ...
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from models.cache import KVCache, cached_states, empty_cache, last_logits
from models.config import ModelConfig
from models.decoder import Params, bind
from models.sampling import NOT_A_TOKEN, Sampling, SamplingConfig, sample

Finish = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and how to go on from it.

    Args:
        prompt: token ids, at least one.
        max_new_tokens: at most so many are generated.
        sampling: how tokens are drawn; greedy where temperature is 0.
        stop: ids that end the sequence; the one drawn is not part of the result.

    Raises:
        ValueError: the prompt is empty, or max_new_tokens is below 1.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int = 128
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
    stop: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("prompt", "stop"):
            object.__setattr__(self, name, tuple(int(token) for token in getattr(self, name)))
        if not self.prompt:
            raise ValueError("prompt is empty: give at least one token, say the one for beginnings")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}.")


@dataclass(frozen=True)
class Event:
    """What happened to one request: a new token, its end, or both.

    Attributes:
        request: index of the request.
        token: the new token; None when it was a stop token.
        finish: None while the request goes on; "stop" for a stop token, "length" when
            max_new_tokens have been generated.
    """

    request: int
    token: int | None
    finish: Finish | None


@dataclass(frozen=True)
class Completion:
    """Generated tokens, without the prompt and without a stop token, and why they end."""

    tokens: tuple[int, ...]
    finish: Finish


class Progress(NamedTuple):
    """Where each row is after a step."""

    token: Int[Array, " B"]  # drawn last
    count: Int[Array, " B"]  # tokens drawn
    done: Bool[Array, " B"]


class Rules(NamedTuple):
    """What decides the next token of each row, and the last one."""

    sampling: Sampling
    limit: Int[Array, " B"]
    stop: Int[Array, "B E"]  # filled up with NOT_A_TOKEN


class _Shape(NamedTuple):
    batch: int
    prompt: int
    capacity: int
    stops: int


class _Programs(NamedTuple):
    prefill: Any
    decode: Any


class Generator:
    """A model ready to generate; keeps the programs that it has compiled.

    Args:
        config: the model.
        params: its parameters. Matrices are kept in the compute dtype, in which they are used.
        context: longest sequence, prompt and new tokens, that will be asked for; by default
            `config.max_seq_len`. "dynamic" and "longrope" scaling choose frequencies by it.

    Raises:
        ValueError: context is not in [1, config.max_seq_len].
    """

    def __init__(self, config: ModelConfig, params: Params, *, context: int | None = None):
        self.config = config
        self.context = config.max_seq_len if context is None else context
        if not 1 <= self.context <= config.max_seq_len:
            raise ValueError(
                f"context must lie in [1, max_seq_len={config.max_seq_len}], got {context}."
            )
        self.params = in_compute_dtype(config, params)
        self.compile_seconds = 0.0
        self._compiled: dict[_Shape, _Programs] = {}

    @property
    def compilations(self) -> int:
        """Programs compiled so far: two for each shape of run."""
        return 2 * len(self._compiled)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """All requests to their ends; see `stream`."""
        tokens: list[list[int]] = [[] for _ in requests]
        finish: dict[int, Finish] = {}
        for event in self.stream(requests):
            if event.token is not None:
                tokens[event.request].append(event.token)
            if event.finish is not None:
                finish[event.request] = event.finish
        return [Completion(tuple(t), finish[i]) for i, t in enumerate(tokens)]

    def stream(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Tokens as they come, step by step, rows in order within a step.

        Raises:
            ValueError: a request is longer than `context`, or a token is not in [0, V).
            FloatingPointError: logits are NaN; the message names the request.
        """
        for i, request in enumerate(requests):
            check_request(request, i, vocab_size=self.config.vocab_size, context=self.context)
        if not requests:
            return
        shape = _shape_of(requests)
        programs = self._programs(shape)
        rules = make_rules(requests, shape.stops)
        lengths = np.array([len(r.prompt) for r in requests], np.int32)
        tokens = np.zeros((shape.batch, shape.prompt), np.int32)
        for row, request in zip(tokens, requests, strict=True):
            row[: len(request.prompt)] = request.prompt
        cache, progress = programs.prefill(self.params, tokens, lengths, rules)
        ended = np.zeros(shape.batch, bool)
        longest = max(r.max_new_tokens for r in requests)
        for step in range(longest):
            current = progress
            if step + 1 < longest:
                cache, progress = programs.decode(self.params, cache, progress, rules)
            drawn, done = np.asarray(current.token), np.asarray(current.done)
            for i in np.flatnonzero(~ended).tolist():
                yield event_of(i, requests[i], int(drawn[i]), bool(done[i]))
            ended = done
            if ended.all():
                return

    def _programs(self, shape: _Shape) -> _Programs:
        if shape not in self._compiled:
            start = time.perf_counter()
            self._compiled[shape] = _compile(self.config, self.params, shape, self.context)
            self.compile_seconds += time.perf_counter() - start
        return self._compiled[shape]


def in_compute_dtype(config: ModelConfig, params: Params) -> Params:
    """Parameters on the device, rounded as each use would round them: all but norm scales.

    The model gives the same bits; decoding, which is bound by reading weights, reads fewer bytes.
    """

    def one(path: tuple, leaf: Any) -> Array:
        is_scale = getattr(path[-1], "key", None) == "scale"
        return jnp.asarray(leaf) if is_scale else jnp.asarray(leaf).astype(config.compute_dtype)

    return jax.tree_util.tree_map_with_path(one, params)


def check_request(request: Request, i: int, *, vocab_size: int, context: int) -> None:
    """That a request fits the model.

    Raises:
        ValueError: it is too long, or a token is outside the vocabulary; the message says which.
    """
    total = len(request.prompt) + request.max_new_tokens
    if total > context:
        raise ValueError(
            f"request {i} may reach {total} tokens ({len(request.prompt)} of the prompt and "
            f"max_new_tokens={request.max_new_tokens}), more than the context of {context}; "
            "shorten one of them."
        )
    for name in ("prompt", "stop"):
        wrong = [t for t in getattr(request, name) if not 0 <= t < vocab_size]
        if wrong:
            raise ValueError(
                f"{name} of request {i} has token {wrong[0]}, outside the vocabulary "
                f"[0, {vocab_size})."
            )


def event_of(i: int, request: Request, token: int, done: bool) -> Event:
    """What a drawn token means for a request.

    Raises:
        FloatingPointError: it was drawn from NaN.
    """
    if token == NOT_A_TOKEN:
        raise FloatingPointError(
            f"the logits of request {i} are NaN or all -inf: the parameters are not finite, or "
            f"the compute dtype overflows."
        )
    if token in request.stop:
        return Event(i, None, "stop")
    return Event(i, token, "length" if done else None)


def make_rules(requests: Sequence[Request], stops: int) -> Rules:
    """Host arrays of what the requests ask, `stops` stop tokens a row."""
    stop = np.full((len(requests), stops), NOT_A_TOKEN, np.int32)
    for row, request in zip(stop, requests, strict=True):
        row[: len(request.stop)] = request.stop
    limit = np.array([r.max_new_tokens for r in requests], np.int32)
    return Rules(Sampling.of([r.sampling for r in requests]), limit, stop)  # type: ignore


def bucket(n: int) -> int:
    """The size that n tokens are padded to: a power of two up to 1024, then multiples of 1024.

    >>> [bucket(n) for n in (1, 17, 1000, 1025, 5000)]
    [16, 32, 1024, 2048, 5120]
    """
    if n > 1024:
        return -(-n // 1024) * 1024
    return max(16, 1 << (n - 1).bit_length())


def _shape_of(requests: Sequence[Request]) -> _Shape:
    # The last token drawn is not cached.
    capacity = max(len(r.prompt) + r.max_new_tokens - 1 for r in requests)
    prompt = bucket(max(len(r.prompt) for r in requests))
    stops = max(4, *(len(r.stop) for r in requests)) if requests else 4
    return _Shape(len(requests), prompt, max(prompt, bucket(capacity)), stops)


def _compile(config: ModelConfig, params: Params, shape: _Shape, context: int) -> _Programs:
    """Both programs ahead of time: what they are given later can compile nothing more."""
    batch = shape.batch

    def abstract(*dims: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)

    example = Request(prompt=(0,))
    rules = jax.tree.map(
        lambda x: abstract(*x.shape, dtype=x.dtype), make_rules([example] * batch, shape.stops)
    )
    prefill = jax.jit(partial(_prefill, config, shape.capacity, context))
    decode = jax.jit(partial(_decode, config, context), donate_argnames=("cache",))
    args = (params, abstract(batch, shape.prompt), abstract(batch), rules)
    cache, progress = jax.eval_shape(prefill, *args)
    return _Programs(
        prefill.lower(*args).compile(), decode.lower(params, cache, progress, rules).compile()
    )


def _prefill(
    config: ModelConfig,
    capacity: int,
    context: int,
    params: Params,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    rules: Rules,
) -> tuple[KVCache, Progress]:
    decoder = bind(config, params)
    cache = empty_cache(config, tokens.shape[0], capacity)
    states, cache = cached_states(
        decoder, cache, tokens, lengths, rope_seq_len=context, is_empty=True
    )
    zeros = jnp.zeros_like(lengths)
    start = Progress(zeros, zeros, jnp.zeros(lengths.shape, bool))
    return cache, advance(start, last_logits(decoder, states, lengths), rules)


def _decode(
    config: ModelConfig,
    context: int,
    params: Params,
    cache: KVCache,
    progress: Progress,
    rules: Rules,
) -> tuple[KVCache, Progress]:
    decoder = bind(config, params)
    new_lengths = (~progress.done).astype(jnp.int32)
    states, cache = cached_states(
        decoder, cache, progress.token[:, None], new_lengths, rope_seq_len=context
    )
    return cache, advance(progress, last_logits(decoder, states, new_lengths), rules)


def advance(progress: Progress, logits: Array, rules: Rules) -> Progress:
    """Draws the next token of every row that goes on; the others stay as they are."""
    drawn = sample(logits, rules.sampling, progress.count)
    token = jnp.where(progress.done, progress.token, drawn)
    count = jnp.where(progress.done, progress.count, progress.count + 1)
    stopped = (token == NOT_A_TOKEN) | jnp.any(token[:, None] == rules.stop, axis=1)
    return Progress(token, count, progress.done | stopped | (count >= rules.limit))
