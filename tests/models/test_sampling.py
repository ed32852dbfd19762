"""Which tokens the filters keep, against the definition in NumPy; and what is drawn from them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from models.sampling import NOT_A_TOKEN, Sampling, SamplingConfig, keep_mask, sample

V = 12
# Logits on a grid, so that some are equal and no two are equal up to rounding.
LOGITS = arrays(np.int64, V, elements=st.integers(-24, 24)).map(lambda x: x / 4)
FILTERS = st.builds(
    SamplingConfig,
    temperature=st.sampled_from([0.25, 1.0, 2.0]),
    top_k=st.integers(0, V + 2),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**32 - 1),
)
_keep = jax.jit(keep_mask)
_sample = jax.jit(sample)


def defined(logits: np.ndarray, config: SamplingConfig, slack: float) -> np.ndarray:
    """The kept tokens in float64, one after the other; slack widens both probability filters."""
    order = sorted(range(V), key=lambda i: (-logits[i], i))
    p = np.exp((logits - logits.max()) / config.temperature)
    allowed = order[: config.top_k] if config.top_k else order
    total, kept, reached = sum(p[i] for i in allowed), np.zeros(V, bool), 0.0
    for i in allowed:
        nucleus = config.top_p == 1 or reached < config.top_p + slack
        kept[i] = nucleus and p[i] / p.max() >= config.min_p - slack
        reached += p[i] / total
    kept[order[0]] = True
    return kept


@given(logits=st.lists(LOGITS, min_size=3, max_size=3), configs=st.tuples(*[FILTERS] * 3))
def test_filters_keep_exactly_the_tokens_of_the_definition(logits, configs):
    kept = np.asarray(_keep(jnp.asarray(logits, jnp.float32), Sampling.of(configs)))
    for row, values, config in zip(kept, logits, configs, strict=True):
        assert (defined(values, config, -1e-5) <= row).all(), "drops what it must keep"
        assert (row <= defined(values, config, 1e-5)).all(), "keeps what it must drop"


@pytest.mark.parametrize(
    ("p", "config", "kept"),
    [
        ([0.5, 0.21, 0.21, 0.08], SamplingConfig(), [1, 1, 1, 1]),
        ([0.5, 0.21, 0.21, 0.08], SamplingConfig(top_k=2), [1, 1, 0, 0]),  # of equals, the first
        ([0.5, 0.21, 0.21, 0.08], SamplingConfig(top_p=0.49), [1, 0, 0, 0]),
        ([0.5, 0.21, 0.21, 0.08], SamplingConfig(top_p=0.51), [1, 1, 0, 0]),
        ([0.4, 0.2, 0.1, 0.3], SamplingConfig(top_k=3), [1, 1, 0, 1]),
        ([0.4, 0.1, 0.2, 0.3], SamplingConfig(top_k=2, top_p=0.55), [1, 0, 0, 0]),  # 4/7 of them
        ([0.4, 0.2, 0.2, 0.19], SamplingConfig(min_p=0.49), [1, 1, 1, 0]),
        ([0.4, 0.2, 0.2, 0.19], SamplingConfig(min_p=0.49, temperature=0.5), [1, 0, 0, 0]),
        ([0.4, 0.2, 0.2, 0.19], SamplingConfig(min_p=1.0), [1, 0, 0, 0]),
    ],
)
def test_filters_by_hand(p, config, kept):
    mask = _keep(jnp.log(jnp.asarray([p])), Sampling.of([config]))
    assert np.asarray(mask)[0].astype(int).tolist() == kept


@given(logits=LOGITS, config=FILTERS, index=st.integers(0, 1000))
def test_draws_come_from_what_is_kept_and_depend_on_seed_and_index_alone(logits, config, index):
    alone = jnp.asarray(logits[None], jnp.float32)
    token = int(_sample(alone, Sampling.of([config]), jnp.array([index]))[0])
    assert _keep(alone, Sampling.of([config]))[0, token]
    other = SamplingConfig(temperature=0.0)
    batch = jnp.asarray(np.stack([logits[::-1], logits, logits]), jnp.float32)
    drawn = _sample(batch, Sampling.of([config, config, other]), jnp.array([3, index, 5]))
    assert drawn[1] == token
    assert drawn[2] == logits.argmax()


def test_draws_have_the_probabilities_of_the_softmax():
    logits = jnp.log(jnp.asarray([0.5, 0.3, 0.2]))
    draws = 20_000
    sampling = Sampling.of([SamplingConfig(temperature=0.5, top_k=2, seed=7)] * draws)
    batch = jnp.broadcast_to(logits, (draws, 3))
    tokens = np.asarray(_sample(batch, sampling, jnp.arange(draws)))
    share = np.bincount(tokens, minlength=3) / draws
    np.testing.assert_allclose(share, [25 / 34, 9 / 34, 0.0], atol=0.015)  # 4.8 standard errors


def test_nan_is_never_a_token():
    logits = jnp.asarray([[0.0, jnp.nan], [-jnp.inf, -jnp.inf], [-jnp.inf, 1.0]])
    for temperature in (0.0, 1.0):
        sampling = Sampling.of([SamplingConfig(temperature=temperature)] * 3)
        drawn = sample(logits, sampling, jnp.zeros(3, jnp.int32))
        assert drawn.tolist() == [NOT_A_TOKEN, NOT_A_TOKEN, 1]


def test_a_greedy_batch_sorts_nothing_and_a_tiny_temperature_is_greedy():
    logits = jnp.asarray([[1e4, -1e4, 9e3]])
    sampling = Sampling.of([SamplingConfig(temperature=1e-30)])
    assert sample(logits, sampling, jnp.array([0])).tolist() == [0]
    assert "cond" in str(jax.make_jaxpr(partial(sample, logits, sampling))(jnp.array([0])))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("min_p", 1.5),
        ("seed", -1),
    ],
)
def test_bad_settings_are_named(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingConfig(**{field: value})
