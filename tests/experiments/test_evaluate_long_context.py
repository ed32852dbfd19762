"""Long-context evaluation: prompts, losses by position, and the command."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_runs import MODEL, TINY, in_folder, make_dataset, run

from experiments import evaluate
from experiments.data.tokenizer import ByteTokenizer
from experiments.evaluation import long_context, token_losses
from experiments.evaluation.loading import load_model
from experiments.evaluation.long_context import Options, Variant
from experiments.evaluation.passkey import PasskeyMaker
from models.decoder import apply, init_params
from models.loss import next_token_loss

LONG = replace(MODEL, max_seq_len=256)
PARAMS = init_params(LONG, jax.random.key(0))
MAKER = PasskeyMaker(make_dataset().heldout, ByteTokenizer())


@settings(deadline=None, max_examples=50)
@given(length=st.integers(96, 400), depth=st.floats(0, 1), seed=st.integers(0, 9))
def test_a_prompt_hides_its_answer_once_at_its_depth(length, depth, seed):
    made = MAKER.make(length, depth, (seed,))
    assert made.tokens.shape == (length + 1,)
    text = ByteTokenizer().decode(made.tokens[1:])
    answer = text[-made.answer :]
    assert answer[1:].isdigit()
    assert len(answer) == 6
    before_answer = text[: -made.answer]
    statement = f" The pass key is{answer}."
    assert before_answer.count(statement) == 1
    room = length - len(statement) - len(" What is the pass key? The pass key is") - made.answer
    assert before_answer.index(statement) == round(depth * room)
    assert before_answer.endswith(" What is the pass key? The pass key is")


def test_prompts_of_a_cell_differ_and_are_the_same_every_time():
    tokens, answers = MAKER.batch(128, 0.5, 8, seed=3)
    assert len({row.tobytes() for row in tokens}) == 8
    assert (tokens == MAKER.batch(128, 0.5, 8, seed=3)[0]).all()
    assert (tokens != MAKER.batch(128, 0.5, 8, seed=4)[0]).any()
    assert (answers == 6).all()


def test_a_prompt_without_room_is_refused():
    with pytest.raises(ValueError, match=r"needs 6\d to .* got seq_len 40"):
        MAKER.make(40, 0.5, (0,))
    with pytest.raises(ValueError, match="depth must lie in"):
        MAKER.make(128, 1.5, (0,))


def test_losses_in_chunks_are_the_losses_of_training(monkeypatch):
    monkeypatch.setattr(token_losses, "CHUNK", 40)  # does not divide 100
    tokens = np.random.default_rng(0).integers(0, 256, (3, 101), np.int32)
    nll, hits = token_losses.token_losses(LONG, PARAMS, tokens)
    logits = apply(LONG, PARAMS, jnp.asarray(tokens[:, :-1]))
    wanted, parts = next_token_loss(logits, jnp.asarray(tokens[:, 1:]))
    assert nll.shape == hits.shape == (3, 100)
    np.testing.assert_allclose(nll.mean(), wanted, rtol=1e-5)
    np.testing.assert_allclose(hits.mean(), parts["accuracy"], rtol=1e-5)


def test_loss_by_position_is_causal_and_counts_every_position_once():
    """Positions within L do not feel how long the window is; the bins cover all of it."""
    options = Options(model="", bins=5, batch_size=2)
    variant = Variant("as trained", LONG, PARAMS)
    tokens = np.random.default_rng(1).integers(0, 256, (3, 129), np.int32)
    long = long_context.position_losses(variant, tokens, replace(options, bins=8))
    short = long_context.position_losses(variant, tokens[:, :65], replace(options, bins=4))
    np.testing.assert_allclose(long["loss"][:4], short["loss"], rtol=1e-5)
    odd = long_context.position_losses(variant, tokens, options)
    assert odd["edges"][0] == 0
    assert odd["edges"][-1] == 128
    nll, _ = long_context.score(variant, tokens, 2)
    mean = np.average(odd["loss"], weights=np.diff(odd["edges"]))
    np.testing.assert_allclose(mean, nll.mean(), rtol=1e-6)


def test_a_key_counts_as_found_only_when_all_of_it_is_right(monkeypatch):
    length, missed = 128, []

    def perfect_but(variant, tokens, batch_size):
        hits = np.ones((len(tokens), length), bool)
        hits[:, : length - 6] = False  # what comes before the answer does not matter
        hits[missed, -3] = False
        return np.zeros(hits.shape), hits

    monkeypatch.setattr(long_context, "score", perfect_but)
    options = Options(model="", trials=4)
    variant = Variant("any", LONG, PARAMS)
    assert long_context.passkey_cell(variant, MAKER, length, 0.5, options)["accuracy"] == 1
    missed = [1]
    assert long_context.passkey_cell(variant, MAKER, length, 0.5, options)["accuracy"] == 0.75


def test_a_loss_that_is_not_finite_is_an_error():
    bad = jax.tree.map(lambda x: x * np.nan, PARAMS)
    with pytest.raises(ValueError, match="as trained: 256 of 256 losses are not finite"):
        long_context.score(Variant("as trained", LONG, bad), np.zeros((2, 129), np.int32), 2)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run at 16 tokens, and one that went on to 32 under YaRN."""
    folder = tmp_path_factory.mktemp("runs")
    schedule = replace(TINY.schedule, total_steps=8, warmup_steps=2, cooldown_steps=2)
    short = in_folder(folder / "short", schedule=schedule)
    run(short)
    longer = in_folder(
        folder / "longer", schedule=schedule, context=((4, 32, 1e4),), context_rope="yarn"
    )
    run(longer)
    return short, longer


def test_a_run_is_loaded_with_the_rope_it_was_trained_with(runs):
    short, longer = (load_model(config.out) for config in runs)
    assert (short.trained_len, short.config.rope_scaling) == (16, None)
    assert longer.trained_len == 32
    scaling = longer.config.rope_scaling
    assert scaling is not None
    assert (scaling.type, scaling.factor, scaling.original_max_seq_len) == ("yarn", 2.0, 16)
    assert short.data is not None
    assert short.data.corpus == "sample"


def test_the_command_measures_every_variant_and_draws_it(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = [
        "long_context", "--model", runs[0].out, "--extended", runs[1].out, "--out", "result",
        "--trained-len", "96", "--multiples", "1", "2", "--depths", "0", "1", "--trials", "2",
        "--windows", "4", "--bins", "4", "--scalings", "ntk", "yarn", "--attention", "xla",
    ]  # fmt: skip
    assert evaluate.main(arguments) == 0, capsys.readouterr().err
    result = json.loads((tmp_path / "result/long_context.json").read_text())
    names = [v["name"] for v in result["variants"]]
    assert names == ["as trained", "ntk x2", "yarn x2", "longer, trained on"]
    assert result["lengths"] == [96, 192]
    losses = [v["positions"]["loss"] for v in result["variants"]]
    assert len({tuple(x) for x in losses}) == 4  # each variant is another model
    assert all(len(v["passkey"]) == 4 for v in result["variants"])
    assert (tmp_path / "result/long_context.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "passkey 192" in printed
    assert "yarn x2" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name an evaluation; choose from long_context"),
        (["nothing"], "unknown evaluation 'nothing'"),
        (["long_context", "--model", "/nowhere"], "/nowhere is no run folder"),
    ],
)
def test_errors_are_one_line(arguments, message, capsys):
    assert evaluate.main(arguments) != 0
    assert message in capsys.readouterr().err.splitlines()[0]


def test_a_scaled_model_is_not_scaled_again(runs):
    longer = load_model(runs[1].out)
    with pytest.raises(ValueError, match="type 'yarn' already; give --scalings without values"):
        long_context.make_variants(longer, {}, 32, Options(model="x"))
