"""Batches by data index: the same tokens whatever the history, and none lost at a switch."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_runs import TINY, make_dataset

from experiments.configs.train import PRESETS
from experiments.training.config import ScheduleConfig, TrainConfig, differences
from experiments.training.curriculum import BatchSource, make_curriculum, next_index
from experiments.training.plot import plot_schedule, schedule_table
from models.sharding import MeshConfig

dataset = make_dataset()


def source(accumulation=1, **options):
    arguments = {"batch_size": 4, "seq_len": 8, "rope_theta": 1e4}
    curriculum = make_curriculum(**(arguments | options))
    return BatchSource(dataset, curriculum, seed=3, accumulation=accumulation)


def test_without_switches_it_is_the_loader():
    plain = dataset.batches(4, 8, seed=3)
    for index in (0, 1, 17):
        np.testing.assert_array_equal(source().tokens_at(index), plain.batch_at(index))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), max_size=4))
def test_a_ramp_reads_the_same_rows_in_the_same_order(steps):
    """However batches grow, their rows in a row are those of the plain loader: none twice."""
    starts = list(itertools.accumulate(gap for gap, _ in steps))
    ramp = [(start, rows) for start, (_, rows) in zip(starts, steps, strict=True)]
    ramped = source(batch_ramp=ramp)
    rows = np.concatenate([ramped.tokens_at(i) for i in range(starts[-1] + 3 if starts else 3)])
    plain = dataset.batches(1, 8, seed=3)
    np.testing.assert_array_equal(rows, [plain.batch_at(i)[0] for i in range(len(rows))])


def test_longer_sequences_go_on_behind_the_shorter_ones():
    switched = source(context=[(5, 16, 5e5)], batch_ramp=[(3, 6)])
    shapes = [switched.tokens_at(i).shape for i in range(7)]
    assert shapes == [(4, 9)] * 3 + [(6, 9)] * 2 + [(3, 17)] * 2
    phases = switched.curriculum.phases
    assert [p.rope_theta for p in phases] == [1e4, 1e4, 5e5]
    assert [p.tokens for p in phases] == [32, 48, 48]  # a switch of context keeps the tokens
    first = phases[-1].first_row
    assert first * 16 >= (3 * 4 + 2 * 6) * 8  # in tokens: not before where the others stopped
    plain = dataset.batches(1, 16, seed=3)
    np.testing.assert_array_equal(switched.tokens_at(5)[0], plain.batch_at(first)[0])


def test_microbatches_are_the_batch_in_order():
    whole, cut = source(), source(accumulation=2)
    assert cut.at(3)["tokens"].shape == (2, 2, 9)
    np.testing.assert_array_equal(cut.at(3)["tokens"].reshape(4, 9), whole.tokens_at(3))


@given(
    windows=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=5),
    index=st.integers(0, 50),
)
def test_next_index_is_the_first_that_no_window_holds(windows, index):
    skips = [(a, a + n) for a, n in windows]
    allowed = (i for i in itertools.count(index) if not any(a <= i < b for a, b in skips))
    assert next_index(index, skips) == next(allowed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_ramp": [(5, 8), (5, 16)]}, "batch_ramp must start above 0 and rise"),
        ({"context": [(0, 16, 1e4)]}, "context must start above 0"),
        ({"context": [(4, 64, 1e4)]}, "make batch_size a multiple of 8"),
        ({"accumulation": 3}, "accumulation 3 must divide every batch size"),
    ],
)
def test_bad_curricula_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        source(**options)


# ---- configs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_named_configs_are_valid_and_plottable(name, tmp_path):
    config = PRESETS[name]()
    assert config.schedule.make().warmup_steps < config.schedule.total_steps
    assert f"{config.batch_size * config.seq_len:,}" in schedule_table(config)
    assert len(config.digest()) == 16


def test_the_plot_is_a_picture(tmp_path):
    config = TrainConfig(
        TINY.model, seq_len=8, batch_ramp=((10, 64),), context=((50, 32, 1e6),),
        schedule=ScheduleConfig(total_steps=80, warmup_steps=10),
    )  # fmt: skip
    plot_schedule(config, tmp_path / "new" / "s.png")
    assert (tmp_path / "new" / "s.png").read_bytes().startswith(b"\x89PNG")
    assert schedule_table(config).count("\n") >= 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 64}, "need model.max_seq_len >= 64"),
        ({"skip": ((5, 5),)}, "skip must hold windows"),
        ({"branch_step": 3}, "branch_step needs branch_from"),
        ({"init_from": "a", "branch_from": "b"}, "give one"),
        ({"accumulation": 0}, "accumulation must be at least 1"),
    ],
)
def test_bad_configs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**({"model": TINY.model, "seq_len": 16} | changes))


def test_only_what_changes_numbers_is_part_of_the_digest():
    base = TrainConfig(TINY.model, seq_len=16)
    free = TrainConfig(TINY.model, seq_len=16, out="x", log_every=5, mesh=MeshConfig(data=1))
    other = TrainConfig(TINY.model, seq_len=16, schedule=ScheduleConfig(peak=2e-3))
    assert base.digest() == free.digest() != other.digest()
    assert differences(base.fixed(), other.fixed()) == ["schedule.peak"]
