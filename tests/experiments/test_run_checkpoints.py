"""Checkpoints are whole or passed over, whatever happens to the disk."""

import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.training.guard import GuardConfig, empty_window
from experiments.training.run_checkpoints import (
    SEAL,
    CheckpointError,
    Checkpoints,
    RetentionConfig,
    kept,
    load,
)
from experiments.training.state import TrainState

SHARDING = jax.sharding.NamedSharding(
    jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)),
    jax.sharding.PartitionSpec(),
)
fill = jax.jit(lambda s: jax.tree.map(jnp.zeros_like, s), donate_argnums=0)


def make_state(step: int, size: int = 1000) -> TrainState:
    rng = np.random.default_rng(step)
    values = {"w": rng.standard_normal(size).astype(np.float32)}
    state = TrainState(
        values,
        {"mu": values["w"] * 2},
        jnp.int32(step),
        jnp.int32(step + 7),
        jax.random.key(step),
        empty_window(GuardConfig(window=4, min_history=2)),
    )
    return jax.device_put(state, SHARDING)


def abstract():
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SHARDING), make_state(0)
    )


def record(step: int) -> dict:
    return {"step": step, "data_index": step + 7}


def save(checkpoints: Checkpoints, step: int, size: int = 1000) -> None:
    checkpoints.save(make_state(step, size), record(step))
    checkpoints.wait()


def same(a: TrainState, b: TrainState) -> bool:
    plain = lambda x: jax.random.key_data(x) if x.dtype == jax.random.key(0).dtype else x  # noqa: E731
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(plain(x), plain(y), equal_nan=True) for x, y in pairs)


@pytest.fixture
def checkpoints(tmp_path):
    with Checkpoints(tmp_path / "checkpoints", RetentionConfig(latest=9)) as value:
        yield value


def test_round_trip_is_exact_although_the_buffers_are_donated_at_once(checkpoints):
    state = make_state(5, size=2_000_000)
    checkpoints.save(state, record(5) | {"x": [1.5, None]})
    jax.block_until_ready(jax.tree.leaves(fill(state))[0])  # writes over what is being saved
    checkpoints.wait()
    (saved,) = checkpoints.saved()
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SHARDING),
        make_state(5, size=2_000_000),
    )
    loaded, found = checkpoints.load_newest(like)
    assert same(loaded, make_state(5, size=2_000_000))
    assert found == saved
    assert found.record == record(5) | {"x": [1.5, None]}
    assert loaded.params["w"].sharding == SHARDING


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def largest(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


DAMAGES = {
    "differs": lambda folder: flip(largest(folder)),
    "missing": lambda folder: largest(folder).unlink(),
    "incomplete": lambda folder: (folder / SEAL).unlink(),
    "not readable": lambda folder: (folder / SEAL).write_text("{"),
    "was changed": lambda folder: (folder / SEAL).write_text(
        (folder / SEAL).read_text().replace('"step": 2', '"step": 3')
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_checkpoint_is_named_and_passed_over(checkpoints, damage):
    for step in (1, 2):
        save(checkpoints, step)
    folder = checkpoints.folder / "00000002"
    DAMAGES[damage](folder)
    with pytest.raises(CheckpointError, match=damage):
        load(folder, abstract())
    state, found = checkpoints.load_newest(abstract())
    assert found.step == 1
    assert same(state, make_state(1))
    (problem,) = checkpoints.problems()
    assert "00000002" in problem
    assert damage in problem


def test_another_model_is_refused(checkpoints):
    save(checkpoints, 1)
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SHARDING), make_state(1, size=10)
    )
    with pytest.raises(CheckpointError, match="does not fit"):
        load(checkpoints.folder / "00000001", like)


def test_a_full_disk_ends_with_the_last_good_checkpoint_intact(tmp_path):
    """A real limit on file size: writing fails half-way, as on a full disk."""
    checkpoints = Checkpoints(tmp_path / "c", RetentionConfig())
    save(checkpoints, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"00000002 could not be written .*00000001"):
            save(checkpoints, 2, size=2_000_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.name for p in checkpoints.folder.iterdir()] == ["00000001"]
    state, _ = checkpoints.load_newest(abstract()) or pytest.fail("none found")
    assert same(state, make_state(1))
    save(checkpoints, 2)  # and with room again it goes on
    assert checkpoints.saved()[-1].step == 2


def test_saving_again_after_a_rollback(checkpoints):
    for step in (1, 2, 3):
        save(checkpoints, step)
    (checkpoints.folder / "00000009.orbax-checkpoint-tmp-1").mkdir()
    checkpoints.discard(lambda s: s.step > 1)
    assert [p.name for p in checkpoints.folder.iterdir()] == ["00000001"]
    save(checkpoints, 2)
    assert [s.step for s in checkpoints.saved()] == [1, 2]


def test_thinning_out_happens(tmp_path):
    checkpoints = Checkpoints(tmp_path, RetentionConfig(latest=1, margin=2, keep_every=3))
    for step in range(9):
        save(checkpoints, step)
    steps = [s.step for s in checkpoints.saved()]
    assert steps == sorted(kept(range(9), checkpoints.config))
    shutil.rmtree(tmp_path)


@given(
    every=st.integers(1, 70),
    latest=st.integers(1, 3),
    margin=st.integers(0, 200),
    saves=st.integers(1, 80),
)
def test_after_every_save_there_is_something_to_roll_back_to(every, latest, margin, saves):
    """One that is old enough, and not much older; and the number of files stays bounded."""
    config = RetentionConfig(every=every, latest=latest, margin=margin)
    steps: set[int] = set()
    for save_number in range(saves):
        now = save_number * every
        steps = kept([*steps, now], config)
        assert now in steps
        assert len(steps) >= min(latest, save_number + 1)
        old = [s for s in steps if s <= now - margin]
        if now >= margin:
            assert max(old) >= now - 1.5 * margin - 2 * every
        assert len(steps) <= latest + 5


@pytest.mark.parametrize(("field", "value"), [("every", 0), ("latest", 0), ("margin", -1)])
def test_retention_names_the_field(field, value):
    with pytest.raises(ValueError, match=field):
        RetentionConfig(**{field: value})
