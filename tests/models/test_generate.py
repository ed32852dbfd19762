"""Generation: cached logits equal the full forward pass; neighbours and padding change nothing."""

import dataclasses
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import monitoring

from models import ModelConfig, apply, bind, init_params
from models.cache import KVCache, cached_states, empty_cache
from models.generate import Completion, Generator, Request, in_compute_dtype
from models.rope_scaling import RopeScaling
from models.sampling import SamplingConfig

CONFIG = ModelConfig(
    vocab_size=32,
    num_layers=2,
    d_model=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_dim=24,
    max_seq_len=64,
    rope_theta=100.0,
    compute_dtype="float32",
    attention_implementation="reference",  # compiles faster; one variant takes the other
)
YARN = RopeScaling(type="yarn", factor=4.0, original_max_seq_len=8)
LLAMA3 = RopeScaling(
    type="llama3", factor=8.0, original_max_seq_len=8, low_freq_factor=1.0, high_freq_factor=4.0
)
VARIANTS = {
    "gqa-xla": dataclasses.replace(CONFIG, attention_implementation="xla"),
    "mqa-tied-llama3": dataclasses.replace(
        CONFIG, num_kv_heads=1, tie_embeddings=True, rope_scaling=LLAMA3
    ),
    "qk_norm-dynamic-unrolled": dataclasses.replace(
        CONFIG,
        qk_norm=True,
        scan_layers=False,
        rope_scaling=RopeScaling(type="dynamic", factor=2.0, original_max_seq_len=8),
    ),
    "bias-window-partial-yarn": dataclasses.replace(
        CONFIG, qkv_bias=True, sliding_window=(None, 5), rotary_dim=6, rope_scaling=YARN
    ),
}
LENGTHS = np.array([9, 1, 5], np.int32)
PROMPTS = tuple(tuple(int(t) for t in np.arange(n) * 7 % 32) for n in LENGTHS)


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@lru_cache
def _params(config: ModelConfig):
    """Random parameters without compiling `init_params`, large enough that logits differ."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        if "scale" in jax.tree_util.keystr(path):
            return jnp.asarray(rng.uniform(0.5, 1.5, leaf.shape), leaf.dtype)
        return jnp.asarray(rng.normal(size=leaf.shape) * 2 * leaf.shape[-1] ** -0.5, leaf.dtype)

    abstract = jax.eval_shape(partial(init_params, config), jax.random.key(0))
    return jax.tree_util.tree_map_with_path(draw, abstract)


@lru_cache
def _generator(config: ModelConfig = CONFIG) -> Generator:
    return Generator(config, _params(config))


def _requests(prompts=PROMPTS, max_new_tokens: int = 12, **options: Any) -> list[Request]:
    return [Request(prompt=p, max_new_tokens=max_new_tokens, **options) for p in prompts]


@pytest.mark.parametrize("name", VARIANTS)
def test_cached_logits_equal_the_full_forward_pass_at_every_position(name):
    """Prefill, one token, three tokens, none: rows of unequal lengths; the cache begins as NaN."""
    config = VARIANTS[name]
    params, rows, steps = _params(config), len(LENGTHS), [9, 1, 3, 0, 1]
    tokens = np.random.default_rng(1).integers(0, 32, (rows, 64)).astype(np.int32)
    full = np.asarray(jax.jit(partial(apply, config))(params, tokens))
    decoder = bind(config, params)
    nan = jnp.full_like(empty_cache(config, rows, 32).keys, jnp.nan)
    cache = KVCache(nan, nan, jnp.zeros(rows, jnp.int32))

    @partial(jax.jit, static_argnames="is_empty")
    def run(cache, new, new_lengths, is_empty):
        states, cache = cached_states(
            decoder, cache, new, new_lengths, rope_seq_len=64, is_empty=is_empty
        )
        return decoder.logits(states), cache

    at = np.zeros(rows, int)
    for step, width in enumerate(steps):
        # The second row sits out the third step; padding is no token at all.
        count = LENGTHS if step == 0 else np.where(np.arange(rows) == 1, width * (step != 2), width)
        width = max(width, 1)
        new = np.full((rows, width), 10**6, np.int32)
        for b in range(rows):
            new[b, : count[b]] = tokens[b, at[b] : at[b] + count[b]]
        logits, cache = run(cache, new, count.astype(np.int32), is_empty=step == 0)
        for b in range(rows):
            got, want = logits[b, : count[b]], full[b, at[b] : at[b] + count[b]]
            np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(full).max())
        at += count
        assert cache.lengths.tolist() == at.tolist()


def test_greedy_is_the_argmax_of_the_full_forward_pass():
    forward = jax.jit(partial(apply, CONFIG))
    for prompt, completion in zip(PROMPTS, _generator().generate(_requests()), strict=True):
        sequence = [*prompt, *completion.tokens]
        padded = np.zeros((1, 64), np.int32)  # causal: what follows is not seen
        padded[0, : len(sequence)] = sequence
        best = np.asarray(forward(_params(CONFIG), padded))[0].argmax(-1)
        assert best[len(prompt) - 1 : len(sequence) - 1].tolist() == list(completion.tokens)
        assert completion.finish == "length"
        assert len(completion.tokens) == 12


def test_a_sequence_does_not_depend_on_its_batch():
    sampling = [SamplingConfig(temperature=t, top_p=0.9, seed=9) for t in (0.0, 1.0, 0.0)]
    requests = [
        Request(prompt=p, max_new_tokens=m, sampling=s)
        for p, m, s in zip(PROMPTS, (12, 3, 7), sampling, strict=True)
    ]
    together = _generator().generate(requests)
    assert [len(c.tokens) for c in together] == [12, 3, 7]
    assert _generator().generate(requests[::-1]) == together[::-1]
    for request, completion in zip(requests, together, strict=True):
        assert _generator().generate([request]) == [completion]


def test_a_seed_gives_the_same_tokens_and_another_others():
    def drawn(seed: int) -> list[Completion]:
        return _generator().generate(_requests(sampling=SamplingConfig(seed=seed)))

    assert drawn(5) == drawn(5)
    assert drawn(5) != drawn(6)
    assert len({c.tokens for c in _generator().generate(
        _requests((PROMPTS[0],) * 2, sampling=SamplingConfig(seed=5))
    )}) == 1  # fmt: skip


def test_a_stop_token_ends_its_row_alone():
    plain = _generator().generate(_requests())
    # A token of the first row, where it comes first.
    stop = next(t for t in plain[0].tokens[1:] if t != plain[0].tokens[0])
    requests = _requests()
    requests[0] = dataclasses.replace(requests[0], stop=(31, stop) if stop != 31 else (stop,))
    stopped = _generator().generate(requests)
    at = next(i for i, t in enumerate(plain[0].tokens) if t in requests[0].stop)
    assert stopped[0] == Completion(plain[0].tokens[:at], "stop")
    assert stopped[1:] == plain[1:]


def test_a_run_compiles_two_programs_and_a_like_one_none():
    compiled = []

    def listener(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration_secs)

    generator = Generator(CONFIG, _params(CONFIG))
    jax.clear_caches()
    monitoring.register_event_duration_secs_listener(listener)
    try:
        generator.generate(_requests(sampling=SamplingConfig(seed=1)))
        assert len(compiled) == generator.compilations == 2
        # Other prompts, lengths, seeds, filters and stop tokens of the same buckets.
        others = _requests((PROMPTS[1], PROMPTS[2], (1, 2)), max_new_tokens=15, stop=(1, 2))
        generator.generate(others)
        assert len(compiled) == generator.compilations == 2
    finally:
        monitoring.unregister_event_duration_listener(listener)


def test_events_come_step_by_step():
    events = list(_generator().stream(_requests(PROMPTS, max_new_tokens=2)))
    assert [e.request for e in events] == [0, 1, 2, 0, 1, 2]
    assert [e.finish for e in events] == [None] * 3 + ["length"] * 3
    assert list(_generator().stream([])) == []


def test_parameters_rounded_ahead_give_the_same_bits():
    config = dataclasses.replace(CONFIG, compute_dtype="bfloat16")
    tokens = np.arange(12, dtype=np.int32)[None]
    forward = jax.jit(partial(apply, config))
    held = in_compute_dtype(config, _params(config))
    assert held["embedding"]["table"].dtype == jnp.bfloat16
    a, b = forward(_params(config), tokens), forward(held, tokens)
    assert np.array_equal(np.asarray(a), np.asarray(b))


def test_what_cannot_be_is_named():
    generator = _generator()
    with pytest.raises(ValueError, match="at least one token"):
        Request(prompt=())
    with pytest.raises(ValueError, match="max_new_tokens"):
        Request(prompt=(1,), max_new_tokens=0)
    with pytest.raises(ValueError, match="request 1 may reach 69 tokens"):
        generator.generate([Request(prompt=(1,)  , max_new_tokens=2),
                            Request(prompt=(1,) * 9, max_new_tokens=60)])  # fmt: skip
    with pytest.raises(ValueError, match="outside the vocabulary"):
        generator.generate(_requests([(3, 32)]))
    with pytest.raises(ValueError, match="context"):
        Generator(CONFIG, _params(CONFIG), context=65)


def test_nan_parameters_are_an_error():
    params = jax.tree.map(lambda x: x, _params(CONFIG))
    params["final_norm"] = {"scale": jnp.full_like(params["final_norm"]["scale"], jnp.nan)}
    with pytest.raises(FloatingPointError, match="request 0"):
        Generator(CONFIG, params).generate(_requests(PROMPTS[:1], max_new_tokens=2))
