"""The command line of the trainer, and how it says that it cannot."""

import json

import pytest

from experiments import train
from experiments.training.processes import distributed_arguments
from experiments.training.watch import Console


def test_options_reach_the_config():
    config = train.parse(
        "tiny",
        [
            "--out", "x", "--schedule.shape", "linear", "--schedule.cooldown-steps", "7",
            "--model.num-layers", "3", "--optimizer.name", "muon", "--mesh.fsdp", "2",
            "--batch-ramp", "10", "32", "20", "64", "--context", "30", "256", "5e5",
            "--rollback.extra", "9", "--rollback.no-enabled",
        ],
    )  # fmt: skip
    assert (config.out, config.schedule.shape, config.schedule.cooldown_steps) == ("x", "linear", 7)
    assert (config.model.num_layers, config.optimizer.name, config.mesh.fsdp) == (3, "muon", 2)
    assert config.batch_ramp == ((10, 32), (20, 64))
    assert config.context == ((30, 256, 5e5),)
    assert (config.rollback.extra, config.rollback.enabled) == (9, False)
    assert config.model.d_model == train.parse("tiny", []).model.d_model


def test_the_schedule_can_be_seen_before_it_is_followed(tmp_path, capsys):
    picture = tmp_path / "schedule.png"
    assert train.main(["tiny", f"--plot-schedule={picture}", "--schedule.total-steps", "99"]) == 0
    assert picture.exists()
    printed = capsys.readouterr().out
    assert "98" in printed
    assert "1.000e-02" in printed
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "name a run; choose from tiny"),
        (["nothing"], "unknown run 'nothing'"),
        (["tiny", "--plot-schedule"], "--plot-schedule needs a value"),
        (["tiny", "--mesh.fsdp", "3"], "does not fill 1 devices"),
        (["tiny", "--data.corpus", "/nowhere"], "no such directory"),
        (["tiny", "--branch-from", "nowhere"], "nowhere is no run folder"),
    ],
)
def test_errors_are_one_line_and_say_what_to_do(args, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train.main(args) != 0
    said = capsys.readouterr().err
    assert message in said.splitlines()[0]
    assert "Traceback" not in said


def test_a_field_out_of_range_is_named(capsys):
    with pytest.raises(SystemExit):
        train.main(["tiny", "--accumulation", "0"])
    assert "accumulation must be at least 1" in capsys.readouterr().err


def test_plain_starts_of_several_processes():
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    whole: dict[str, str] = {names[0]: "a:1", names[1]: "4", names[2]: "3"}
    assert distributed_arguments(whole) == {
        "coordinator_address": "a:1",
        "num_processes": 4,
        "process_id": 3,
    }
    assert distributed_arguments({}) is None
    for broken, message in (
        ({k: v for k, v in whole.items() if k != names[1]}, "not JAX_NUM_PROCESSES"),
        (whole | {names[2]: "4"}, "must be below"),
        (whole | {names[1]: "many"}, "must be integers"),
    ):
        with pytest.raises(ValueError, match=message):
            distributed_arguments(broken)


def test_the_console_says_how_long_it_will_take():
    console = Console(100, seconds=0)
    row = {
        "step": 0,
        "loss": 5.0,
        "accepted": True,
        "lr": 1e-3,
        "tokens_per_second": 10.0,
        "mfu": None,
    }
    assert "left -:--" in console.line(row, 0.0)
    console._began = (0.0, 0)
    later = console.line(row | {"step": 49, "mfu": 0.413}, 98.0)
    assert "step 50/100" in later
    assert "MFU 41.3%" in later
    assert "left 0:01:40" in later
    assert "not finite  refused" in console.line(row | {"loss": None, "accepted": False}, 1.0)
    json.dumps(row)
