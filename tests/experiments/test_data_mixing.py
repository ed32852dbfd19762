"""Mixing: shares by formula, epoch caps, and a schedule that is exact in every window."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.data.mixing import (
    RECIPES,
    MixConfig,
    MixtureSchedule,
    cap_epochs,
    integer_shares,
    interleave,
    mix_shares,
    temperature_shares,
)

count_lists = st.lists(st.integers(0, 40), min_size=1, max_size=7).filter(any)


def deviations(counts, periods=2):
    """(steps + 1, k): rows so far minus the share of them, per source."""
    table = np.tile(interleave(counts), periods)
    one_hot = table[:, None] == np.arange(len(counts))
    rows = np.concatenate([np.zeros((1, len(counts))), np.cumsum(one_hot, axis=0)])
    steps = np.arange(len(rows))[:, None]
    return rows - steps * np.array(counts) / sum(counts)


@settings(max_examples=150)
@given(count_lists)
def test_every_prefix_and_every_window_keeps_the_shares(counts):
    off = deviations(counts)
    k = max(2, sum(count > 0 for count in counts))
    # A balanced table (short periods) is bounded by 1 in windows, the others in prefixes.
    spread = (off.max(axis=0) - off.min(axis=0)).max()
    assert np.abs(off).max() <= (1 if spread <= 1 + 1e-9 else 1 - 1 / (2 * k - 2)) + 1e-9
    # A window from a to b deviates by off[b] - off[a].
    assert spread <= 2 - 1 / (k - 1) + 1e-9
    assert np.abs(off[:: sum(counts)]).max() == 0  # whole periods are exact


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_named_recipes_are_within_one_in_every_window(recipe):
    counts = integer_shares(list(RECIPES[recipe].values()))
    off = deviations(counts, periods=3)
    assert (off.max(axis=0) - off.min(axis=0)).max() <= 1 + 1e-9


def test_within_one_in_every_window_is_not_possible_in_general():
    """For 8/11, 2/11, 1/11: no sequence of period 11, by trying them all."""
    counts, period = (8, 2, 1), 11
    found = 0
    for second in itertools.combinations(range(1, period), 2):
        for third in range(period):
            if third in second:
                continue
            table = np.zeros(period, dtype=int)
            table[list(second)] = 1
            table[third] = 2
            rows = np.cumsum(table[:, None] == np.arange(3), axis=0)
            off = rows * period - np.arange(1, period + 1)[:, None] * np.array(counts)
            spread = np.maximum(off.max(axis=0), 0) - np.minimum(off.min(axis=0), 0)
            found += bool((spread <= period).all())
    assert found == 0


@settings(max_examples=50)
@given(count_lists, st.lists(st.integers(0, 10**12), min_size=1, max_size=20))
def test_random_access_agrees_with_counting(counts, indices):
    schedule = MixtureSchedule(tuple(counts))
    walk = np.tile(interleave(counts), 3)
    sources, ranks = schedule.at(np.arange(len(walk)))
    np.testing.assert_array_equal(sources, walk)
    for source in range(len(counts)):
        own = ranks[sources == source]
        np.testing.assert_array_equal(own, np.arange(len(own)))
    # Far away too: shifting by whole periods shifts the ranks by whole counts.
    far = np.array(indices, dtype=np.int64)
    sources, ranks = schedule.at(far)
    near_sources, near_ranks = schedule.at(far % schedule.period)
    np.testing.assert_array_equal(sources, near_sources)
    shift = far // schedule.period * np.array(counts)[sources]
    np.testing.assert_array_equal(ranks, near_ranks + shift)


def test_exact_shares_have_small_periods():
    assert integer_shares(list(RECIPES["web"].values())) == (16, 2, 1, 1)
    assert integer_shares([1 / 3, 1 / 3, 1 / 3]) == (1, 1, 1)
    assert integer_shares([1.0]) == (1,)


@given(
    st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1.0)), min_size=1, max_size=9).filter(any),
    st.integers(9, 500),
)
def test_rounded_shares_are_close_and_none_vanishes(weights, period):
    shares = np.array(weights) / math.fsum(weights)
    counts = integer_shares(shares.tolist(), period=period)
    total = sum(counts)
    assert total <= period
    assert all((count > 0) == (share > 0) for count, share in zip(counts, shares, strict=True))
    assert np.abs(np.array(counts) / total - shares).max() <= len(shares) / total + 1e-12


def test_temperature():
    sizes = {"a": 1e6, "b": 1e3, "none": 0}
    assert temperature_shares(sizes, 1.0)["a"] == pytest.approx(1000 / 1001)
    flat = temperature_shares(sizes, 1e9)
    assert flat["a"] == pytest.approx(0.5, abs=1e-6)
    assert flat["none"] == 0
    huge = temperature_shares({"a": 1e300, "b": 1e-300}, 0.5)
    assert huge == {"a": 1.0, "b": 0.0}
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        temperature_shares(sizes, 0.0)
    with pytest.raises(ValueError, match="no source holds any tokens"):
        temperature_shares({"a": 0}, 1.0)


def unimax(sizes, budget, epochs):
    """Algorithm 1 of the paper, by hand."""
    used, left = {}, budget
    for number, name in enumerate(sorted(sizes, key=sizes.__getitem__)):
        used[name] = min(left / (len(sizes) - number), epochs * sizes[name])
        left -= used[name]
    return {name: used[name] / sum(used.values()) for name in sizes}


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=8), st.floats(0.01, 1), st.floats(1, 8))
def test_uniform_shares_with_caps_are_unimax(sizes, filled, epochs):
    named = {str(i): float(size) for i, size in enumerate(sizes)}
    budget = filled * epochs * sum(sizes)
    uniform = dict.fromkeys(named, 1 / len(named))
    got = cap_epochs(uniform, named, budget=budget, max_epochs=epochs)
    assert got == pytest.approx(unimax(named, budget, epochs), abs=1e-9)
    assert math.fsum(got.values()) == pytest.approx(1)


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.floats(0.01, 1)), min_size=1, max_size=8),
    st.floats(0.01, 1),
)
def test_caps_hold_and_keep_the_proportions_of_the_rest(pairs, filled):
    sizes = {str(i): float(size) for i, (size, _) in enumerate(pairs)}
    total = math.fsum(weight for _, weight in pairs)
    shares = {str(i): weight / total for i, (_, weight) in enumerate(pairs)}
    budget = filled * 4 * sum(sizes.values())
    got = cap_epochs(shares, sizes, budget=budget, max_epochs=4)
    assert all(got[n] * budget <= 4 * sizes[n] * (1 + 1e-9) for n in got)
    free = [n for n in got if got[n] * budget < 4 * sizes[n] * (1 - 1e-9)]
    scales = [got[n] / shares[n] for n in free]
    assert not free or max(scales) == pytest.approx(min(scales), rel=1e-6)


def test_a_budget_out_of_reach():
    with pytest.raises(ValueError, match=r"budget_tokens = 1000 .*\(400\)"):
        cap_epochs({"a": 1.0, "b": 0.0}, {"a": 100, "b": 900}, budget=1000, max_epochs=4)


def test_recipes_multipliers_and_groups():
    sizes = {"cc": 600, "blogs": 300, "git": 50, "books": 10, "wiki": 40}
    groups = {"cc": "web", "blogs": "web", "git": "code", "books": "books", "wiki": "curated"}
    shares = mix_shares(sizes, groups, MixConfig(recipe="web"))
    assert shares["cc"] + shares["blogs"] == pytest.approx(0.8)
    assert shares["cc"] == pytest.approx(2 * shares["blogs"])
    assert shares["git"] == pytest.approx(0.1)
    doubled = mix_shares(sizes, groups, MixConfig(recipe="web", multipliers={"books": 2.0}))
    assert doubled["books"] == pytest.approx(0.1 / 1.05)
    own = mix_shares(sizes, groups, MixConfig(shares={"web": 0.5, "code": 0.5}))
    assert own["wiki"] == 0
    with pytest.raises(ValueError, match="multipliers names no source: book; known: cc, blogs"):
        mix_shares(sizes, groups, MixConfig(multipliers={"book": 2.0}))
    with pytest.raises(ValueError, match=r"group 'code' has a share of 0.1 but no tokens"):
        mix_shares(sizes | {"git": 0}, groups, MixConfig(recipe="web"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "wep"}, "recipe must be one of web, code, got 'wep'"),
        ({"shares": {"a": 0.5}}, "shares must sum to 1, got 0.5"),
        ({"shares": {"a": 1.0}, "recipe": "web"}, "not both"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"max_epochs": 4.0}, "belong together"),
        ({"multipliers": {"a": -1.0}}, "multipliers.a"),
        ({"period": 0}, "period must lie in"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        MixConfig(**options)
