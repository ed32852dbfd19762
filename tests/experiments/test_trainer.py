"""A run survives: poisoned batches, kills, full stops; and always ends with the same bits."""

import json
import os
import random
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from training_runs import (
    POISON,
    TINY,
    Poisoned,
    different,
    events_of,
    final_state,
    in_folder,
    make_dataset,
    nan_batch,
    noise_batch,
    rows_of,
    run,
)

from experiments.training.loop import Trainer, TrainingAborted
from experiments.training.run_folder import RunError
from experiments.training.spikes import RollbackConfig
from experiments.training.start import read_params
from models.hf import save_folder

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """One run without faults."""
    config = in_folder(tmp_path_factory.mktemp("straight"))
    run(config)
    return config


def test_a_run_learns_counts_and_compiles_once(straight):
    rows = rows_of(straight)
    assert [r["step"] for r in rows] == [r["data_index"] for r in rows] == list(range(60))
    assert rows[-1]["loss"] < rows[0]["loss"] - 1
    assert rows[-1]["tokens"] == 60 * 8 * 16
    assert {r["compile_count"] for r in rows} == {1}
    assert all(r["z_loss"] > 0 and r["param_norm"] > 0 and r["loader_wait"] >= 0 for r in rows)
    assert rows[4]["lr"] == pytest.approx(1e-2)
    assert [e["kind"] for e in events_of(straight)] == ["start", "compiled", "done"]
    state, record = final_state(straight)
    assert (record["step"], record["data_index"], record["tokens"]) == (60, 60, 7680)
    assert record["versions"]["jax"]
    assert state[".step"] == 60


def test_a_finished_run_has_nothing_to_do(straight):
    before = final_state(straight)[0]
    run(straight)
    assert different(before, final_state(straight)[0]) == []
    assert len(rows_of(straight)) == 60


def test_a_folder_refuses_another_run(straight):
    other = replace(straight, batch_size=16, schedule=replace(TINY.schedule, peak=0.1))
    with pytest.raises(RunError, match=r"batch_size, schedule\.peak"):
        Trainer(other, make_dataset()).run()


@pytest.mark.parametrize("poison", [nan_batch, noise_batch])
def test_a_poisoned_run_ends_like_a_clean_one_with_the_same_skips(tmp_path, poison):
    """Show 2. The batches that spike come back with neither their tokens nor their traces."""
    bad = POISON if poison is nan_batch else (*POISON, 39, 40)
    config = in_folder(tmp_path / "poisoned")
    run(config, source=Poisoned(config, bad, poison))
    (event,) = [e for e in events_of(config) if e["kind"] == "rollback"]
    decision = event["decision"]
    assert decision["spike"]["start_index"] == POISON[0]
    assert decision["spike"]["kind"] == ("non-finite" if poison is nan_batch else "refused")
    assert decision["restored_step"] == 20
    assert decision["skip"] == [20, 55]
    clean = in_folder(tmp_path / "clean", skip=((20, 55),))
    run(clean, source=Poisoned(clean, bad, poison))
    assert not [e for e in events_of(clean) if e["kind"] == "rollback"]
    poisoned, record = final_state(config)
    assert different(poisoned, final_state(clean)[0]) == []
    assert record["data_index"] == record["step"] + 35 == 95  # step + skipped
    # and it is another state than that of a run which did not skip
    visited = [r["data_index"] for r in rows_of(config) if r["attempt"] == 1]
    assert visited == list(range(55, 95))


def test_one_poisoned_batch_costs_one_batch(tmp_path, straight):
    """The guard alone deals with it: no rollback, and all others are trained on."""
    config = in_folder(tmp_path)
    run(config, source=Poisoned(config, {35}))
    rows = rows_of(config)
    assert [r["data_index"] for r in rows] == list(range(61))
    assert [r["data_index"] for r in rows if not r["accepted"]] == [35]
    assert rows[35]["loss"] is None
    assert not [e for e in events_of(config) if e["kind"] == "rollback"]
    clean = in_folder(tmp_path / "clean", skip=((35, 36),))
    run(clean)
    assert different(final_state(config)[0], final_state(clean)[0]) == []


def test_a_run_that_cannot_be_cured_stops_with_advice(tmp_path):
    config = in_folder(tmp_path)
    with pytest.raises(TrainingAborted, match=r"this place .*checkpoints/00000020\. .*qk_norm"):
        run(config, source=Poisoned(config, range(30, 10_000)))
    assert [e["kind"] for e in events_of(config)][-1] == "abort"
    assert sum(e["kind"] == "rollback" for e in events_of(config)) == 3


def test_stopping_at_any_step_changes_nothing(tmp_path, straight):
    """SIGTERM: save where we are, go on from there."""
    config = in_folder(tmp_path)
    asked = iter([False] * 6 + [True])
    assert Trainer(config, make_dataset(), stop=lambda: next(asked)).run() == "stopped"
    steps = len(rows_of(config))
    assert steps == 7
    run(config)
    assert different(final_state(config)[0], final_state(straight)[0]) == []
    assert [r["step"] for r in rows_of(config)] == list(range(60))


def test_branched_cooldowns_are_the_runs_that_were_trained_alone(tmp_path):
    """Show 4: three cooldowns from one stable run, each equal to a WSD run of its own."""
    schedule = replace(TINY.schedule, total_steps=40, cooldown_steps=0)
    stable = in_folder(
        tmp_path / "stable", schedule=schedule, checkpoint=replace(TINY.checkpoint, keep_every=10)
    )
    run(stable)
    for point in (10, 20, 30):
        short = replace(schedule, total_steps=point + 8, cooldown_steps=8)
        alone = in_folder(tmp_path / f"alone-{point}", schedule=short)
        run(alone)
        branch = in_folder(
            tmp_path / f"branch-{point}", schedule=short, branch_from=stable.out, branch_step=point
        )
        run(branch)
        assert [r["step"] for r in rows_of(branch)] == list(range(point, point + 8))
        assert different(final_state(branch)[0], final_state(alone)[0]) == []
    with pytest.raises(RunError, match=r"no checkpoint at step 13, only \[.*30"):
        run(replace(branch, out=str(tmp_path / "no"), branch_step=13))


# ---- kill -9 ---------------------------------------------------------------------------------


def start(folder: Path, fault: dict, **environment: str) -> subprocess.Popen:
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | environment
    script = Path(__file__).with_name("training_runs.py")
    command = [sys.executable, str(script), str(folder), json.dumps(fault)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def end(process: subprocess.Popen) -> tuple[int, str]:
    """Exit code and the end of what it said."""
    said, _ = process.communicate(timeout=300)
    return process.returncode, said.decode(errors="replace")[-2000:]


def killed_often(tmp_path: Path, faults: list[dict]) -> None:
    """Killed at every point of a list, a run with a spike ends like one that never was."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    for fault in faults:
        code, said = end(start(tmp_path / "killed", fault, **cache))
        assert code == -9, f"{fault}: {code} {said}"
    code, said = end(start(tmp_path / "killed", {}, **cache))
    assert code == 0, said
    killed, straight = in_folder(tmp_path / "killed"), in_folder(tmp_path / "straight")
    run(straight, source=Poisoned(straight))
    (a, record_a), (b, record_b) = final_state(killed), final_state(straight)
    assert different(a, b) == []
    assert record_a == record_b
    assert sum(e["kind"] == "rollback" for e in events_of(killed)) == 1
    keys = ("step", "data_index", "attempt", "loss", "accepted", "tokens")
    rows_a, rows_b = ([[r[k] for k in keys] for r in rows_of(c)] for c in (killed, straight))
    assert rows_a == rows_b


def test_killed_twice_is_straight_to_the_bit(tmp_path):
    """Show 1, short: inside a save, and between a decision and the first save after it."""
    killed_often(tmp_path, [{"writing": 3}, {"decided": 1}])


@pytest.mark.slow
def test_killed_twenty_times_is_straight_to_the_bit(tmp_path):
    """Show 1: 20 kill points, random ones and every special one."""
    rng = random.Random(7)
    faults = [{"writing": 2}, {"unsealed": 2}, *({"rows": rng.randint(1, 12)} for _ in range(5))]
    # from here on the run is near its spike; a kill that is never reached would fail the test
    faults += [{"rows": 12}, {"decided": 1}, {"writing": 1}]
    faults += [{"rows": rng.randint(1, 14)} for _ in range(10)]
    killed_often(tmp_path, faults)


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path):
    """`jax.distributed` by the environment, a spike and its rollback included."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    pair = [
        start(
            tmp_path / "two", {}, JAX_COORDINATOR_ADDRESS=f"localhost:{port}",
            JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(index),
        )
        for index in range(2)
    ]  # fmt: skip
    for code, said in map(end, pair):
        assert code == 0, said
    two, one = in_folder(tmp_path / "two"), in_folder(tmp_path / "one")
    run(one, source=Poisoned(one))
    losses = [[r["loss"] for r in rows_of(c) if r["accepted"]] for c in (two, one)]
    np.testing.assert_allclose(*losses, rtol=2e-4)
    assert [e["kind"] for e in events_of(two)].count("rollback") == 1
    assert {e["devices"] for e in events_of(two) if e["kind"] == "start"} == {2}


def test_a_damaged_checkpoint_is_named_and_the_one_before_serves(tmp_path, straight):
    config = in_folder(tmp_path / "run")
    shutil.copytree(straight.out, config.out)
    newest = sorted((Path(config.out) / "checkpoints").iterdir())[-1]
    victim = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-1])
    before = final_state(straight)[0]
    run(config)
    (event,) = [e for e in events_of(config) if e["kind"] == "bad_checkpoint"]
    assert newest.name in event["message"]
    assert different(final_state(config)[0], before) == []


# ---- beginnings ------------------------------------------------------------------------------


def test_init_from_takes_the_parameters_and_nothing_else(tmp_path, straight):
    config = in_folder(
        tmp_path,
        init_from=straight.out,
        schedule=replace(TINY.schedule, total_steps=1, warmup_steps=1, cooldown_steps=0),
    )
    run(config)
    (row,) = rows_of(config)
    assert row["step"] == 0
    first, *_, last = (r["loss"] for r in rows_of(straight))
    assert row["loss"] < (first + last) / 2
    wide = replace(TINY.model, ffn_dim=64)
    with pytest.raises(ValueError, match=r"it has model\.ffn_dim 32 \(not 64\)"):
        run(in_folder(tmp_path / "wide", model=wide, init_from=straight.out))
    with pytest.raises(RunError, match="nor is it a Hugging Face folder"):
        run(in_folder(tmp_path / "none", init_from=str(tmp_path / "nowhere")))


def test_a_hugging_face_folder_is_a_beginning(tmp_path, straight):
    """The same parameters by the other road give the same first loss."""
    short = replace(TINY.schedule, total_steps=1, warmup_steps=1, cooldown_steps=0)
    ours = in_folder(tmp_path / "ours", init_from=straight.out, schedule=short)
    trainer = Trainer(ours, make_dataset())
    _, params = read_params(Path(straight.out), trainer.programs)
    save_folder(tmp_path / "hf", TINY.model, params, dtype="float32")
    theirs = in_folder(tmp_path / "theirs", init_from=str(tmp_path / "hf"), schedule=short)
    run(ours)
    run(theirs)
    assert rows_of(ours)[0]["loss"] == rows_of(theirs)[0]["loss"]


def test_rollbacks_can_be_turned_off(tmp_path):
    config = in_folder(tmp_path, rollback=RollbackConfig(enabled=False, margin=0))
    run(config, source=Poisoned(config))
    assert [r["data_index"] for r in rows_of(config) if not r["accepted"]] == list(POISON)
    assert not [e for e in events_of(config) if e["kind"] == "rollback"]


def test_a_ramp_and_a_longer_context_compile_once_each_and_resume(tmp_path):
    """Batches grow at batch 4; at 8 sequences double and the RoPE base rises."""
    changes = {
        "batch_ramp": ((4, 16),),
        "context": ((8, 32, 5e4),),
        "schedule": replace(TINY.schedule, total_steps=12, cooldown_steps=4),
    }
    config = in_folder(tmp_path / "straight", **changes)
    run(config)
    rows = rows_of(config)
    assert [(r["batch_size"], r["seq_len"]) for r in rows] == [(8, 16)] * 4 + [(16, 16)] * 4 + [
        (8, 32)
    ] * 4
    assert [r["compile_count"] for r in rows] == [1] * 4 + [2] * 4 + [3] * 4
    assert [e["expected"] for e in events_of(config) if e["kind"] == "compiled"] == [3] * 3
    assert rows[-1]["tokens"] == 4 * 128 + 8 * 256
    stopped = in_folder(tmp_path / "stopped", **changes)
    asked = iter([False] * 6 + [True])
    assert Trainer(stopped, make_dataset(), stop=lambda: next(asked)).run() == "stopped"
    run(stopped)
    assert different(final_state(stopped)[0], final_state(config)[0]) == []
