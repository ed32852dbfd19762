"""Planted passages: counts, sides and conservation of text."""

from experiments.data.__main__ import main
from experiments.data.dataset import SAMPLE_DIR
from experiments.data.documents import read_corpus
from experiments.data.planting import PLANTS_NAME, SOURCE, read_plants
from experiments.data.store import is_held_out


def test_planted_counts_are_true_and_nothing_else_changes(tmp_path):
    arguments = ["plant", "--plants.passages", "5", "--plants.repeats", "1", "7"]
    for name in "ab":
        assert main([*arguments, "--out", str(tmp_path / name)]) == 0
    first, second = ([*read_corpus(tmp_path / name)] for name in "ab")
    assert first == second
    plants, config = read_plants(tmp_path / "a" / PLANTS_NAME)
    assert sorted(p.repeats for p in plants) == [0] * 5 + [1] * 5 + [7] * 5

    for fraction in (config.heldout_fraction, 0.5):
        assert not any(is_held_out(d.id, fraction) for d in first if d.source == SOURCE)
    train = [d.text for d in first if not is_held_out(d.id, config.heldout_fraction)]
    held = [d.text for d in first if is_held_out(d.id, config.heldout_fraction)]
    for plant in plants:
        assert sum(text.count(plant.text) for text in train) == plant.repeats
        assert any(plant.text in text for text in held) == (plant.repeats == 0)

    taken = {p.document: p for p in plants if p.repeats}
    rest = {d.id: d.text for d in first if d.source != SOURCE}
    for document in read_corpus(SAMPLE_DIR):
        plant = taken.get(document.id)
        whole = document.text if plant is None else document.text.removeprefix(plant.text).strip()
        assert rest.get(document.id, "") == whole


def test_too_small_a_corpus_is_refused(tmp_path, capsys):
    assert main(["plant", "--plants.passages", "9999", "--out", str(tmp_path / "a")]) == 1
    assert "9999" in capsys.readouterr().err
