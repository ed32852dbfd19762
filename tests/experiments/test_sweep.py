"""The sweep survives: resume equals straight, points are trained once, errors say what to do."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments import sweep
from experiments.data import TokenDataset
from experiments.data.tokenizer import ByteTokenizer
from experiments.scaling import estimate, progress, runs, worker
from experiments.scaling.ladder import SweepConfig, make_plan

TINY = SweepConfig(
    budgets=(4e7, 8e7),
    ladder=("8x1",),
    sizes=("8x1",),
    seq_len=16,
    batch_size=4,
    head_dim=8,
    heldout_tokens=512,
    corpus="sample",
    lr=0.01,
    max_epochs=1e9,
)


def make_dataset() -> TokenDataset:
    """The bytes of this file: text that needs no corpus."""
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.uint16)
    cut = len(text) * 3 // 4
    return TokenDataset(
        name="this file",
        train=text[:cut],
        heldout=text[cut:],
        vocab_size=256,
        bytes_per_token=1.0,
        tokenizer=ByteTokenizer(),
        fingerprint="0" * 64,
        meta={},
    )


@pytest.fixture(scope="module")
def dataset() -> TokenDataset:
    return make_dataset()


@pytest.fixture(scope="module")
def data(dataset):
    return worker.DeviceData(dataset)


def new_run(folder: Path, dataset, **changes) -> runs.Run:
    config = replace(TINY, out=str(folder), **changes)
    plan = make_plan(config, corpus_tokens=len(dataset.train))
    return runs.create_run(config, plan, dataset=dataset)


def results(run: runs.Run) -> dict:
    """What a fit may see of every point."""
    found = {p.id: run.result(p) for p in run.plan.points}
    timing = ("seconds", "resumed_at")
    return {k: v and {x: y for x, y in v.items() if x not in timing} for k, v in found.items()}


def events(run: runs.Run, name: str) -> list[str]:
    rows = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    return [row["id"] for row in rows if row["event"] == name]


@pytest.fixture(scope="module")
def straight(tmp_path_factory, dataset, data) -> runs.Run:
    """An unbroken sweep that the others must equal."""
    run = new_run(tmp_path_factory.mktemp("straight") / "run", dataset)
    worker.work(run, data)
    return run


def test_every_point_is_trained_once_and_learns(straight, data):
    assert sorted(events(straight, "finished")) == sorted(p.id for p in straight.plan.points)
    before = results(straight)
    worker.work(straight, data)  # nothing is left: nothing happens
    assert results(straight) == before
    assert len(events(straight, "point")) == len(straight.plan.points)
    for point in straight.plan.points:
        result = straight.result(point)
        assert result is not None
        assert result["status"] == "done"
        assert result["decayed"]
        assert result["loss"] < 0.9 * np.log(256)
        assert result["bits_per_byte"] == pytest.approx(result["loss"] / np.log(2))
        assert not (straight.point_folder(point) / "state.npz").exists()
        assert straight.steps_done(point) == point.steps


def test_stopped_and_continued_equals_straight_bit_for_bit(tmp_path, dataset, data, straight):
    run = new_run(tmp_path / "run", dataset)
    stops = 0
    while run.unfinished():
        chunks = iter([False, True])  # two chunks, then stop, again and again
        try:
            worker.work(run, data, stop=lambda chunks=chunks: next(chunks, True))
        except worker.Stopped:
            stops += 1
    assert stops >= 2
    assert results(run) == results(straight)
    for point in run.plan.points:
        rows = (run.point_folder(point) / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(row)["step"] for row in rows]
        assert steps == sorted(set(steps))
        assert steps[-1] == point.steps


def test_metrics_beyond_the_checkpoint_are_cut_back(tmp_path, dataset, data, straight):
    """A kill between a metrics row and the next checkpoint leaves rows that will come again."""
    run = new_run(tmp_path / "run", dataset)
    point = run.plan.points[0]
    chunks = iter([True])
    with pytest.raises(worker.Stopped):
        worker.train_point(run, point, data, stop=lambda: next(chunks))
    path = run.point_folder(point) / "metrics.jsonl"
    row = json.loads(path.read_text().splitlines()[-1])
    path.write_text(path.read_text() + json.dumps(row | {"step": row["step"] + 5}) + "\n" + '{"st')
    worker.train_point(run, point, data)
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == sorted(set(steps))
    assert results(run)[point.id] == results(straight)[point.id]


def test_a_held_point_is_left_to_its_holder(tmp_path, dataset, data):
    run = new_run(tmp_path / "run", dataset)
    first, second = run.plan.points
    with runs.claim(run.point_folder(first)) as mine:
        assert mine
        with runs.claim(run.point_folder(first)) as again:
            assert not again
        worker.work(run, data)
        assert run.result(first) is None
        assert run.result(second) is not None
        with pytest.raises(runs.SweepError, match="held by another process"):
            sweep.train_all(run, data, workers=1)
    sweep.train_all(run, data, workers=1)
    assert run.unfinished() == []


def test_a_diverged_point_is_reported_and_left_out(tmp_path, dataset, data):
    run = new_run(tmp_path / "run", dataset, lr=1e30)
    worker.work(run, data)
    for point in run.plan.points:
        result = run.result(point)
        assert result is not None
        assert result["status"] == "diverged"
        assert result["loss"] is None
    points = runs.collect_points(run)
    assert np.isnan(points.loss).all()
    result = sweep.fit_run(run, sweep.FitConfig(bootstrap=0, starts=8))
    (warning,) = [w for w in result["warnings"] if w["code"] == "non_finite_loss"]
    assert warning["rows"] == [p.id for p in run.plan.points]


def test_kill_nine_then_continue_equals_unbroken(tmp_path, dataset, straight, data):
    """A worker process is killed while it trains; what it finished stays, the rest is redone."""
    run = new_run(tmp_path / "run", dataset)
    program = (
        "import sys, time; from pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import test_sweep as t; from experiments.scaling import runs, worker\n"
        "data = worker.DeviceData(t.make_dataset())\n"
        f"run = runs.open_run(Path({str(run.folder)!r}))\n"
        "worker.CHECKPOINT_SECONDS = 0\n"
        "worker.work(run, data, stop=lambda: time.sleep(0.2))\n"
    )
    paths = os.pathsep.join([str(sweep.ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": paths}
    child = subprocess.Popen([sys.executable, "-c", program], env=env)
    first, *_ = (run.point_folder(p) for p in run.plan.points)
    deadline = time.monotonic() + 240
    states = [run.point_folder(p) / "state.npz" for p in run.plan.points]
    while not any(s.exists() for s in states) and child.poll() is None:
        assert time.monotonic() < deadline, "the worker wrote no checkpoint"
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert run.unfinished()
    worker.work(run, data)
    assert results(run) == results(straight)
    assert first.exists()


def test_another_sweep_in_the_same_folder_is_refused(straight):
    runs.check_same_sweep(straight, replace(straight.config, workers=7, out="elsewhere"))
    with pytest.raises(runs.SweepError, match=r"lr is 0\.01 there, 0\.02 now.*--out"):
        runs.check_same_sweep(straight, replace(straight.config, lr=0.02))


def test_another_corpus_is_refused(straight, dataset):
    with pytest.raises(runs.SweepError, match="other tokens"):
        runs.check_same_data(straight, replace(dataset, fingerprint="1" * 64))


def test_results_without_their_plan_are_refused(tmp_path, dataset):
    run = new_run(tmp_path / "run", dataset)
    (run.point_folder(run.plan.points[0]) / "result.json").write_text("{}")
    (run.folder / "config.json").unlink()
    with pytest.raises(runs.SweepError, match=r"no config\.json"):
        runs.create_run(run.config, run.plan, dataset=dataset)


def test_programs_compiled_ahead_are_the_ones_used(data):
    points = make_plan(replace(TINY, batch_size=2), corpus_tokens=10**6).points[:1]
    worker.precompile(list(points), data)
    chunk = worker.programs_for(points[0].shape).chunk
    seconds, _ = worker.measure_step(points[0], data, seconds=0.01)
    assert 0 < seconds < 1
    assert chunk._cache_size() == 1  # one program, whatever the number of steps


def test_opened_run_equals_created(straight):
    assert runs.open_run(straight.folder) == straight


def test_slow_machine_gets_smaller_budgets(dataset, data, monkeypatch):
    config = replace(TINY, budgets=(1e9, 2e9), max_minutes=1.0, heldout_tokens=64)
    step_flops = make_plan(config, corpus_tokens=10**6).points[0].flops_per_token * 64
    for rate in (1e9, 2e7):
        monkeypatch.setattr(estimate, "measure_step", lambda *_, r=rate: (step_flops / r, 1.0))
        plan, scale, seconds = estimate.plan_for_machine(config, data)
        total = sum(map(sum, seconds.values()))
        assert total <= 60
        assert (scale < 1) == (rate == 2e7)
        assert plan.points[0].budget == pytest.approx(scale * 1e9)


def test_plan_says_which_points_pay_for_compiling(tmp_path, dataset, data, monkeypatch):
    config = replace(TINY, sizes=("8x1", "16x1"), out=str(tmp_path))
    monkeypatch.setattr(estimate, "measure_step", lambda *_: (0.01, 3.0))
    plan, scale, seconds = estimate.plan_for_machine(config, data)
    run = runs.Run(tmp_path, config, plan, scale, runs.describe_dataset(dataset), seconds)
    lines = estimate.plan_table(run).splitlines()
    marked = [line.split()[0] for line in lines[1:] if line.endswith("*")]
    paying = [p for p in plan.points if seconds[p.id].compiling]
    assert marked == [p.id for p in paying]
    assert len({p.shape for p in paying}) == len(paying) == 2  # one of each size
    for point in paying:  # and that which a worker takes first
        assert point.flops == max(p.flops for p in plan.points if p.shape == point.shape)
        printed = next(line for line in lines if line.startswith(point.id)).split()[-1]
        assert printed == f"{sum(seconds[point.id]):.1f}*"
    note = next(line for line in lines if line.startswith("*"))
    assert f"{seconds[paying[0].id].compiling:.1f} of these seconds compile" in note
    assert lines[-1].endswith("compiling included")
    compiled = {k: s._replace(compiling=0.0) for k, s in seconds.items()}
    text = estimate.plan_table(replace(run, estimate=compiled))
    assert "*" not in text
    assert text.endswith("compiling done before")


def test_folders_with_two_numbers_per_point_open(straight, tmp_path):
    stored = json.loads((straight.folder / "config.json").read_text())
    stored["estimate"] = {p["id"]: [3.0, 1.0] for p in stored["points"]}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    run = runs.open_run(tmp_path)
    assert set(run.estimate.values()) == {runs.Seconds(3.0, 0.0, 1.0)}


def test_standing_counts_work_under_way(tmp_path, dataset):
    run = new_run(tmp_path / "run", dataset)
    point = run.plan.points[1]
    path = run.point_folder(point) / "metrics.jsonl"
    path.write_text(json.dumps({"step": point.steps // 2}) + "\n" + '{"step": 9')
    now = progress.standing(run)
    assert (now.points_done, now.points) == (0, 2)
    assert now.work_done == pytest.approx(0.5, abs=0.02)
    assert now.flops_done == pytest.approx(point.flops / 2, rel=0.02)
    assert now.left == pytest.approx((0.5, 1.0), abs=0.02)  # the one under way first
    # At the last step evaluation is still to come, and the compiling of its program.
    path.write_text(json.dumps({"step": point.steps}) + "\n")
    costly = {p.id: runs.Seconds(1.0, 13.0, 5.0) for p in run.plan.points}
    now = progress.standing(replace(run, estimate=costly))
    assert now.left == pytest.approx((3.0 + 5.0, 19.0))
    assert now.work_done == pytest.approx(11.0)


# ---- the command -----------------------------------------------------------------------------


def test_presets_and_overrides():
    config = sweep.parse_config(["--preset", "smoke", "--budgets", "1e9", "2e9", "--lr", "0.5"])
    assert config.budgets == (1e9, 2e9)
    assert config.lr == 0.5
    assert config.out == "runs/smoke"
    assert sweep.parse_config(["--preset=cpu"]) == sweep.PRESETS["cpu"]()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["fly"], "unknown command 'fly'"),
        (["--preset", "tpu"], "--preset must be"),
        (["status", "--out", "no/such/folder"], "holds no sweep"),
        (["--preset", "cpu", "--corpus", "no/such/corpus", "--out", "no/such"], "no/such/corpus"),
    ],
)
def test_errors_are_one_line(args, message, capsys):
    assert sweep.main(args) in (1, 2)
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_bad_field_is_named_before_anything_runs(capsys):
    with pytest.raises(SystemExit) as stop:
        sweep.main(["--preset", "cpu", "--seeds", "1", "1"])
    assert stop.value.code == 2
    assert "seeds repeat: (1, 1)" in capsys.readouterr().err


def test_status_names_every_point(straight, capsys):
    assert sweep.main(["status", "--out", str(straight.folder)]) == 0
    out = capsys.readouterr().out
    for point in straight.plan.points:
        assert point.id in out
    assert "2 of 2 points, 100% of the work" in out


@pytest.mark.slow
def test_whole_command_killed_and_continued_gives_the_same_fit(tmp_path):
    """`run` in real processes, killed with kill -9, against an unbroken one."""
    command = [
        sys.executable,
        "-m",
        "experiments.sweep",
        "--preset",
        "smoke",
        "--max-minutes",
        "60",
    ]
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    subprocess.run([*command, "--out", str(whole)], env=env, check=True, timeout=900)
    child = subprocess.Popen([*command, "--out", str(broken)], env=env)
    while not list(broken.glob("points/*/result.json")):
        assert child.poll() is None
        time.sleep(0.05)
    child.kill()
    child.wait()
    done = subprocess.run(
        [*command, "--out", str(broken)],
        env=env,
        check=True,
        timeout=900,
        capture_output=True,
        text=True,
    )
    assert (whole / "fit.json").read_bytes() == (broken / "fit.json").read_bytes()
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith(f"report: {broken / 'report.html'}")
    finished = [
        json.loads(row)["id"]
        for row in (broken / "events.jsonl").read_text().splitlines()
        if json.loads(row)["event"] == "finished"
    ]
    assert len(finished) == len(set(finished))
