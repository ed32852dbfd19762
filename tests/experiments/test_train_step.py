"""One step, many steps in one call, and the state on disk."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.training.checkpoint import (
    load_state,
    read_json,
    save_state,
    write_atomic,
    write_json,
)
from experiments.training.optimizer import OptimizerConfig, decayed, make_optimizer
from experiments.training.schedule import learning_rate, make_schedule
from experiments.training.state import init_state
from experiments.training.step import gather_batch, make_chunk, make_evaluate, make_step
from models import ModelConfig, apply, init_params, next_token_loss

SEQ_LEN, BATCH, CHUNK = 16, 4, 8
MODEL = ModelConfig(
    vocab_size=32,
    num_layers=1,
    d_model=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    ffn_dim=32,
    max_seq_len=SEQ_LEN,
    compute_dtype="float32",
)
OPTIMIZER = make_optimizer(OptimizerConfig())
SCHEDULE = make_schedule(peak=1e-2, total_steps=16, warmup_steps=2, cooldown_steps=4)


def loss_fn(params, tokens):
    return next_token_loss(apply(MODEL, params, tokens[:, :-1]), tokens[:, 1:])[0]


# One compiled program of each kind for the whole file.
step = jax.jit(make_step(loss_fn, OPTIMIZER))
chunk = make_chunk(loss_fn, OPTIMIZER, seq_len=SEQ_LEN)


@functools.cache
def fresh_params():
    return jax.jit(functools.partial(init_params, MODEL))(jax.random.key(0))


def fresh():
    # copies: the chunk donates its state
    return jax.tree.map(jnp.array, init_state(fresh_params(), OPTIMIZER))


@pytest.fixture(scope="module")
def stream():
    """A periodic text: something that can be learnt in a few steps."""
    return jnp.asarray(np.tile(np.arange(7), 200).astype(np.uint16))


@pytest.fixture(scope="module")
def starts():
    return jnp.asarray(np.random.default_rng(0).integers(0, 1000, (CHUNK, BATCH)), jnp.int32)


def same(a, b) -> bool:
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def test_loss_falls_and_counters_move(stream, starts):
    state, first = chunk(fresh(), stream, starts, CHUNK, SCHEDULE)
    state, second = chunk(state, stream, starts, CHUNK, SCHEDULE)
    # logits of unit variance at the start: ln V + 1/2
    assert first["loss"][0] == pytest.approx(np.log(32) + 0.5, rel=0.15)
    assert second["loss"][-1] < 0.6 * first["loss"][0]
    assert int(state.step) == int(state.data_index) == 2 * CHUNK
    rates = [learning_rate(SCHEDULE, s) for s in range(2 * CHUNK)]
    np.testing.assert_allclose(np.concatenate([first["lr"], second["lr"]]), rates, rtol=1e-6)


def test_chunk_equals_a_loop_of_steps(stream, starts):
    looped = fresh()
    losses = []
    for i in range(CHUNK):
        looped, metrics = step(looped, gather_batch(stream, starts[i], SEQ_LEN), SCHEDULE)
        losses.append(metrics["loss"])
    chunked, metrics = chunk(fresh(), stream, starts, CHUNK, SCHEDULE)
    np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(looped), jax.tree.leaves(chunked), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def test_split_chunks_and_a_file_between_change_nothing(tmp_path, stream, starts):
    """Resume equals straight, bit for bit: how steps are cut into calls must not matter."""
    straight, _ = chunk(fresh(), stream, starts, CHUNK, SCHEDULE)
    state, metrics = chunk(fresh(), stream, starts, 3, SCHEDULE)
    assert np.isnan(metrics["loss"][3:]).all()
    save_state(tmp_path / "state.npz", state)
    state = load_state(tmp_path / "state.npz", jax.eval_shape(fresh))
    rest = jnp.concatenate([starts[3:], starts[:3]])
    resumed, _ = chunk(state, stream, rest, CHUNK - 3, SCHEDULE)
    assert same(straight, resumed)


def test_no_steps_change_nothing(stream, starts):
    state, metrics = chunk(fresh(), stream, starts, 0, SCHEDULE)
    assert same(state, fresh())
    assert np.isnan(metrics["loss"]).all()


def test_update_is_adamw_by_hand(stream, starts):
    """First step: m = g, v = g² after bias correction, so direction = g / (|g| + eps) + wd p."""
    state = fresh()
    batch = gather_batch(stream, starts[0], SEQ_LEN)
    grads = jax.tree.map(np.asarray, jax.jit(jax.grad(loss_fn))(state.params, batch))
    norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * min(1.0, 1.0 / norm), grads)
    after, metrics = step(state, batch, SCHEDULE)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    lr = float(learning_rate(SCHEDULE, 0))
    for p, g, q, decays in zip(
        *map(jax.tree.leaves, (state.params, grads, after.params, decayed(state.params))),
        strict=True,
    ):
        p = np.asarray(p)
        expected = p - lr * (g / (np.abs(g) + 1e-8) + 0.1 * decays * p)
        # the sign of a gradient at rounding level is not defined: leave those out
        clear = np.abs(g) > 1e-6
        np.testing.assert_allclose(np.asarray(q)[clear], expected[clear], atol=1e-5)


def test_decay_spares_norms_and_embeddings():
    flags = {
        jax.tree_util.keystr(path, simple=True, separator="/"): flag
        for path, flag in jax.tree_util.tree_leaves_with_path(decayed(fresh_params()))
    }
    assert {k for k, v in flags.items() if not v} == {
        k for k in flags if "norm" in k or k.startswith("embedding")
    }
    assert flags["head/kernel"]
    assert flags["blocks/attention/query/kernel"]


def test_evaluate_is_the_mean_over_batches(stream, starts):
    batches = jnp.stack([gather_batch(stream, s, SEQ_LEN) for s in starts[:3]])
    params = fresh_params()
    one = jax.jit(loss_fn)
    expected = np.mean([float(one(params, b)) for b in batches])
    assert float(make_evaluate(loss_fn)(params, batches)) == pytest.approx(expected, rel=1e-5)


def test_a_foreign_checkpoint_is_refused(tmp_path):
    save_state(tmp_path / "a.npz", {"x": jnp.zeros(3), "y": jnp.zeros(2)})
    with pytest.raises(ValueError, match="holds other leaves"):
        load_state(tmp_path / "a.npz", {"x": jnp.zeros(3)})
    with pytest.raises(ValueError, match="this run has float32"):
        load_state(tmp_path / "a.npz", {"x": jnp.zeros(4), "y": jnp.zeros(2)})


def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "value.json"
    write_json(path, {"a": 1})

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_json(path, {"a": 2})
    assert read_json(path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["value.json"]


def test_json_refuses_nan_and_names_a_broken_file(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"a": float("nan")})
    write_atomic(tmp_path / "b.json", b"{")
    with pytest.raises(ValueError, match=r"b\.json is not valid JSON"):
        read_json(tmp_path / "b.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [("beta1", 1.0), ("beta2", -0.1), ("eps", 0.0), ("weight_decay", -1.0), ("clip_norm", 0.0)],
)
def test_optimizer_names_the_field(field, value):
    with pytest.raises(ValueError, match=field):
        OptimizerConfig(**{field: value})
