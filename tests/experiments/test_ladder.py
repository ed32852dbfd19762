"""The plan: budgets are met, sizes surround the expected optimum, omissions are explained."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.configs.sweeps import PRESETS
from experiments.scaling.ladder import (
    Point,
    choose_sizes,
    expected_optimum,
    make_plan,
    model_of,
    parse_size,
    peak_learning_rate,
    scale_budgets,
)

CPU = PRESETS["cpu"]()
CORPUS = 4_000_000


@pytest.mark.parametrize(
    ("name", "corpus"), [("cpu", CORPUS), ("gpu", 170_000_000), ("smoke", CORPUS)]
)
def test_every_preset_meets_its_budgets_and_repeats_little(name, corpus):
    config = PRESETS[name]()
    plan = make_plan(config, corpus_tokens=corpus)
    for point in plan.points:
        assert point.budget is not None
        assert point.flops == pytest.approx(point.budget, rel=0.01)
        assert point.tokens <= config.max_epochs * corpus
        assert point.warmup_steps * point.batch_size * point.seq_len <= point.params * 1.5
        assert point.warmup_steps <= 0.1 * point.steps + 1
        assert point.cooldown_steps == pytest.approx(0.2 * point.steps, abs=1)
    assert len({p.id for p in plan.points}) == len(plan.points)
    assert {p.budget for p in plan.points} == set(config.budgets)


@pytest.mark.parametrize(("name", "corpus"), [("cpu", CORPUS), ("gpu", 170_000_000)])
def test_sizes_surround_the_expected_optimum(name, corpus):
    config = PRESETS[name]()
    plan = make_plan(config, corpus_tokens=corpus)
    for budget in config.budgets:
        sizes = [p.params for p in plan.points if p.budget == budget]
        middle = expected_optimum(budget, config)
        assert sum(n < middle for n in sizes) >= 2
        assert sum(n > middle for n in sizes) >= 2
    assert not [note for note in plan.notes if "wanted" in note]


@settings(max_examples=60, deadline=None)
@given(exponent=st.floats(11.5, 13.5), batch=st.sampled_from([1, 2, 8]), seeds=st.integers(1, 3))
def test_plan_properties(exponent, batch, seeds):
    config = replace(
        CPU, budgets=(10**exponent,), batch_size=batch, seeds=tuple(range(seeds)), max_epochs=1e6
    )
    plan = make_plan(config, corpus_tokens=CORPUS)
    for point in plan.points:
        half_step = 0.5 * point.batch_size * point.seq_len * point.flops_per_token
        assert abs(point.flops - 10**exponent) <= half_step * 1.0001
        assert 0 < point.lr <= config.lr_max
        assert point.warmup_steps + point.cooldown_steps <= point.steps
    assert len(plan.points) == seeds * config.sizes_per_budget
    assert plan == make_plan(config, corpus_tokens=CORPUS)


@settings(max_examples=60, deadline=None)
@given(st.floats(9, 15))
def test_chosen_sizes_are_neighbours_on_the_ladder(exponent):
    chosen = choose_sizes(10**exponent, CPU)
    assert len(chosen) == CPU.sizes_per_budget
    first = CPU.ladder.index(chosen[0])
    assert chosen == CPU.ladder[first : first + len(chosen)]


def test_larger_models_learn_slower_and_a_fixed_rate_wins():
    rates = [peak_learning_rate(n, CPU) for n in (10**4, 10**6, 10**8)]
    assert rates == sorted(rates, reverse=True)
    assert peak_learning_rate(108_000_000, replace(CPU, lr_scale=1.0)) == pytest.approx(0.0047)
    assert peak_learning_rate(10**6, replace(CPU, lr=0.5)) == 0.5


def test_repeating_the_corpus_too_often_is_left_out_and_said():
    plan = make_plan(CPU, corpus_tokens=500_000)
    left_out = [note for note in plan.notes if "left out" in note]
    assert left_out
    assert "epochs" in left_out[0]
    assert all(p.tokens <= 4 * 500_000 for p in plan.points)
    with pytest.raises(ValueError, match="no point is left"):
        make_plan(CPU, corpus_tokens=100)


def test_smoke_tests_are_told_from_sweeps():
    def plan(**changes):
        return make_plan(replace(CPU, **changes), corpus_tokens=10**9)

    smoke = make_plan(PRESETS["smoke"](), corpus_tokens=CORPUS)
    assert smoke.is_smoke
    assert "tests that everything works" in smoke.notes[-1]
    assert "are wanted" not in " ".join(smoke.notes)  # what so few sizes cannot give
    assert "are wanted" in plan(sizes=("8x2", "12x2", "16x2")).notes[-1]
    assert not plan().is_smoke
    assert not make_plan(PRESETS["gpu"](), corpus_tokens=170_000_000).is_smoke
    assert plan(budgets=(1e11, 2e11), sizes_per_budget=3, seeds=(0, 1, 2)).is_smoke
    assert not plan(budgets=(1e11, 2e11)).is_smoke  # each minimum can still be wrong
    assert not plan(sizes_per_budget=3).is_smoke
    grid = plan(budgets=(), sizes=("16x1", "32x1"), tokens=(1e5, 2e5))
    assert not grid.is_smoke
    assert grid.sizes_by_budget == {}


def test_tokens_make_a_grid_without_budgets():
    config = replace(CPU, budgets=(), sizes=("16x1", "32x1"), tokens=(1e5, 2e5), seeds=(0, 1))
    plan = make_plan(config, corpus_tokens=CORPUS)
    assert len(plan.points) == 8
    assert {p.budget for p in plan.points} == {None}
    for point in plan.points:
        assert min(abs(point.tokens - t) for t in (1e5, 2e5)) <= 512


def test_points_survive_json():
    for point in make_plan(CPU, corpus_tokens=CORPUS).points:
        assert Point.from_json(json.loads(json.dumps(point.to_json()))) == point


def test_scaling_budgets_moves_the_sizes_too():
    scaled = scale_budgets(CPU, 0.01)
    assert scaled.budgets == tuple(0.01 * b for b in CPU.budgets)
    before, after = (
        np.mean([p.params for p in make_plan(c, corpus_tokens=10**9).points]) for c in (CPU, scaled)
    )
    assert after < before


def test_head_dims_divide_any_even_width():
    for width in (8, 12, 16, 24, 40, 48, 96, 320):
        model = model_of(f"{width}x2", CPU)
        assert model.num_heads * model.head_dim == width
        assert model.head_dim % 2 == 0
        assert model.head_dim == 16 or width % 16


@pytest.mark.parametrize("size", ["", "64", "64x", "x2", "64x2x2", "0x2", "64x0", "a64x2"])
def test_bad_sizes_are_refused(size):
    with pytest.raises(ValueError, match="WIDTHxLAYERS"):
        parse_size(size)


def test_odd_width_is_refused_with_the_fix():
    with pytest.raises(ValueError, match="use 16"):
        model_of("15x2", CPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budgets": (0.0,)}, "budgets"),
        ({"budgets": ()}, "budgets is empty"),
        ({"tokens": (1e5,)}, "tokens needs sizes"),
        ({"seeds": ()}, "seeds is empty"),
        ({"seeds": (1, 1)}, "seeds repeat"),
        ({"sizes_per_budget": 2}, "sizes_per_budget"),
        ({"warmup_fraction": 0.9}, "warmup_fraction"),
        ({"lr": 0.0}, "lr must be"),
        ({"workers": 0}, "workers"),
        ({"max_minutes": 0.0}, "max_minutes"),
        ({"sizes": ("big",)}, "WIDTHxLAYERS"),
    ],
)
def test_bad_fields_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        replace(CPU, **change)
