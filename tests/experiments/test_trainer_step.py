"""The trainer's step: accumulation is the big batch, and what the guard refuses leaves no trace."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.training import guard
from experiments.training.guard import GuardConfig, empty_window
from experiments.training.optimizer import MUON_RMS, OptimizerConfig, make_optimizer, muon_axes
from experiments.training.schedule import make_schedule
from experiments.training.state import init_state
from experiments.training.train_step import accumulate, make_loss, make_train_step
from models import ModelConfig, init_params

T, V = 16, 32
MODEL = ModelConfig(
    vocab_size=V,
    num_layers=1,
    d_model=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    ffn_dim=24,
    max_seq_len=T,
    compute_dtype="float32",
    z_loss=1e-2,
    attention_implementation="reference",  # compiles fastest
)
GUARD = GuardConfig(window=16, min_history=4)
SCHEDULE = make_schedule(peak=1e-2, total_steps=100, warmup_steps=2, cooldown_steps=10)
loss_fn = make_loss(MODEL)
# Compilation is what these tests cost, and nothing here depends on how well XLA optimises.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def params():
    return jit(functools.partial(init_params, MODEL))(jax.random.key(0))


@functools.cache
def program() -> tuple[Any, Any]:
    optimizer = make_optimizer(OptimizerConfig())
    step = jit(make_train_step(loss_fn, optimizer, GUARD), donate_argnums=0)

    def fresh():
        rng = jax.random.key(1)
        state = init_state(params(), optimizer, rng=rng, guard=empty_window(GUARD))
        return jax.tree.map(lambda x: x.copy(), state)  # the step donates its state

    return step, fresh


def batch(seed=0, parts=1, rows=4):
    tokens = np.random.default_rng(seed).integers(0, V, (rows, T + 1), dtype=np.int32)
    return {"tokens": jnp.asarray(tokens.reshape(parts, rows // parts, T + 1))}


def values(tree) -> list[np.ndarray]:
    def plain(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return [plain(x) for x in jax.tree.leaves(tree)]


def same(a, b) -> bool:
    return all(np.array_equal(x, y, equal_nan=True) for x, y in zip(a, b, strict=True))


@functools.cache
def accumulated():
    return jit(functools.partial(accumulate, loss_fn))


# ---- accumulation ----------------------------------------------------------------------------


def test_accumulated_gradient_is_that_of_the_big_batch():
    """With rows of very different weight, where a mean of means goes wrong."""
    weights = np.zeros((4, T), np.float32)
    for row, count in enumerate((2, 16, 3, 15)):
        weights[row, :count] = 1
    run = accumulated()
    results = {}
    for parts in (1, 4):
        split = batch(parts=parts) | {"weights": jnp.asarray(weights.reshape(parts, -1, T))}
        results[parts] = run(params(), split, jax.random.key(0))
    big = jax.tree.leaves(results[1])
    for a, b in zip(big, jax.tree.leaves(results[4]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert results[1][1]["weight"] == 36
    assert results[1][1]["z_loss"] > 0
    rows = [jax.tree.map(lambda x, i=i: x[i : i + 1], split) for i in range(4)]
    alone = [run(params(), row, jax.random.key(0))[0]["final_norm"]["scale"] for row in rows]
    mean_of_means = np.mean(alone, axis=0)
    assert not np.allclose(mean_of_means, results[1][0]["final_norm"]["scale"], rtol=1e-2)


def test_a_batch_in_which_nothing_counts_changes_only_by_decay():
    empty = batch() | {"weights": jnp.zeros((1, 4, T))}
    grads, parts = accumulated()(params(), empty, jax.random.key(0))
    assert all(not np.any(g) for g in jax.tree.leaves(grads))
    assert parts["cross_entropy"] == parts["weight"] == 0


def test_bfloat16_computes_and_float32_is_the_master_copy():
    loss = make_loss(dataclasses.replace(MODEL, compute_dtype="bfloat16"))
    step = make_train_step(loss, make_optimizer(OptimizerConfig()), GUARD)
    state, _ = jax.eval_shape(step, program()[1](), batch(), SCHEDULE)
    for part in (state.params, state.opt_state):
        floats = [x.dtype for x in jax.tree.leaves(part) if jnp.issubdtype(x.dtype, jnp.floating)]
        assert set(floats) == {jnp.dtype("float32")}
    # the matrix products are bfloat16: the loss is near the float32 one and not equal to it
    one = {"tokens": batch()["tokens"][0]}
    half, exact = (jit(f)(params(), one, jax.random.key(0))[0] for f in (loss, loss_fn))
    assert 0 < abs(half - exact) / (4 * T) < 0.02


def test_documents_do_not_see_each_other():
    """With a separator, the loss of the second document does not depend on the first."""
    tokens = np.asarray(batch(rows=2)["tokens"][0]).copy() % (V - 1) + 1
    tokens[:, 8] = 0
    tokens[1, 8:] = tokens[0, 8:]
    weights = np.zeros((2, T), np.float32)
    weights[:, 8:] = 1
    for separator, equal in ((0, True), (None, False)):
        loss = jit(make_loss(MODEL, separator=separator))
        one, two = (
            loss(
                params(),
                {"tokens": jnp.asarray(tokens[i : i + 1]), "weights": jnp.asarray(weights[:1])},
                jax.random.key(0),
            )[0]
            for i in range(2)
        )
        assert np.allclose(one, two, rtol=1e-6) is equal


# ---- guard -----------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_refused_step_changes_nothing_but_the_data_index(poison):
    step, fresh = program()
    state, _ = step(fresh(), batch(), SCHEDULE)
    before = values(state)
    bad = batch(1) | {"weights": jnp.full((1, 4, T), poison, jnp.float32)}
    state, metrics = step(state, bad, SCHEDULE)
    assert not metrics["accepted"]
    assert not np.isfinite(metrics["grad_norm"])
    assert int(state.data_index) == 2
    after = values(dataclasses.replace(state, data_index=jnp.int32(1)))
    assert same(before, after)
    state, metrics = step(state, batch(1), SCHEDULE)  # and the next good batch goes on
    assert metrics["accepted"]
    assert int(state.step) == 2


def test_one_program_serves_every_schedule_of_a_shape():
    step, fresh = program()
    state, before = step(fresh(), batch(), SCHEDULE)
    size = step._cache_size()
    other = make_schedule(peak=0.1, total_steps=7, warmup_steps=0, cooldown_steps=0)
    for seed in range(3):
        state, metrics = step(state, batch(seed), other)
    assert metrics["lr"] == pytest.approx(0.1)
    assert before["lr"] == pytest.approx(0.005)
    assert step._cache_size() == size


@functools.cache
def judged():
    @jit
    def run(losses, norms):
        def body(window, value):
            loss, norm = value
            judgement = guard.judge(
                window, GuardConfig(), loss=loss, grad_norm=norm, update_norm=norm
            )
            new = guard.remember(window, loss=loss, grad_norm=norm)
            keep = functools.partial(jnp.where, judgement.accepted)
            return jax.tree.map(keep, new, window), judgement.accepted

        return jax.lax.scan(body, empty_window(GuardConfig()), (losses, norms))[1]

    return run


def curve(steps=400, seed=0):
    """A falling loss with heavy-tailed noise, and gradient norms with a log-normal one."""
    rng = np.random.default_rng(seed)
    t = np.arange(steps)
    loss = 2 + 8 / np.sqrt(t + 100) + 0.03 * rng.standard_t(6, steps)
    return loss.astype(np.float32), np.exp(0.2 * rng.standard_normal(steps)).astype(np.float32)


def refused(losses, norms):
    return set(np.flatnonzero(~np.asarray(judged()(losses, norms))).tolist())


def test_an_ordinary_run_is_left_alone():
    assert sum(len(refused(*curve(seed=s))) for s in range(5)) <= 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [[0], [20], [200], [200, 201, 202, 203]])
def test_non_finite_values_are_refused_alone(bad, where):
    """Also in warm-up and in bursts: no step after them suffers."""
    losses, norms = curve()
    losses[where] = bad
    assert refused(losses, norms) == set(where)
    losses, norms = curve()
    norms[where] = bad
    assert refused(losses, norms) == set(where)


def test_the_second_spike_is_caught_like_the_first():
    """Two equal spikes 90 steps apart: a window that took in the first would miss the second."""
    losses, norms = curve()
    for start in (200, 290):
        losses[start : start + 60] += 3 * np.exp(-np.arange(60) / 20).astype(np.float32)
    found = refused(losses, norms)
    # 20 steps on, each spike is still 3 / e nats above the curve
    assert found >= set(range(200, 220)) | set(range(290, 310))
    assert not found & set(range(0, 200))


def test_a_gradient_spike_without_a_loss_spike_is_refused():
    losses, norms = curve()
    norms[250] *= 50
    assert refused(losses, norms) == {250}


# ---- optimizers ------------------------------------------------------------------------------


def test_muon_makes_each_layers_matrices_orthogonal_and_leaves_the_rest_to_adam():
    grads = jax.tree.map(
        lambda p: jnp.asarray(np.random.default_rng(p.size).standard_normal(p.shape), jnp.float32),
        params(),
    )
    config = OptimizerConfig(name="muon", weight_decay=0.0, clip_norm=1e9)
    # optax gives Nesterov's momentum to both halves
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.eps, nesterov=True)
    directions = [
        jit(optimizer.update)(grads, optimizer.init(params()), params())[0]
        for optimizer in (make_optimizer(config), adam)
    ]
    axes = muon_axes(params())
    specs = jax.tree.leaves(axes, is_leaf=lambda x: not isinstance(x, dict))
    pairs = zip(*map(jax.tree.leaves, directions), specs, strict=True)
    served = 0
    for muon, plain, spec in pairs:
        if spec is None:
            np.testing.assert_allclose(muon, plain, rtol=1e-5)
            continue
        served += 1
        inputs = int(np.prod([muon.shape[a] for a in spec.reduction_axis]))
        for layer in np.asarray(muon):
            matrix = layer.reshape(inputs, -1)
            singular = np.linalg.svd(matrix, compute_uv=False)
            singular /= MUON_RMS * np.sqrt(max(matrix.shape))
            assert np.all((singular > 0.3) & (singular < 1.3))
    assert served == 7


def test_muon_decays_the_same_matrices_as_adamw():
    zero = jax.tree.map(jnp.zeros_like, params())
    optimizer = make_optimizer(OptimizerConfig(name="muon", weight_decay=0.5))
    direction: Any = jit(optimizer.update)(zero, optimizer.init(params()), params())[0]
    up = params()["blocks"]["mlp"]["up"]["kernel"]
    np.testing.assert_allclose(direction["blocks"]["mlp"]["up"]["kernel"], 0.5 * up, rtol=1e-5)
    assert not np.any(direction["embedding"]["table"])


@pytest.mark.parametrize(
    ("field", "value"),
    [("deviations", 0.0), ("min_history", 1), ("min_history", 999), ("loss_floor", -1.0)],
)
def test_guard_names_the_field(field, value):
    with pytest.raises(ValueError, match=field):
        GuardConfig(**{field: value})
