"""Plants passages with known repeat counts into a corpus, to measure later what a model memorised.

Passages are cut from the train side of the corpus itself, so that nothing but their number tells
them from other text: each is taken out of its document and comes back as 1, 10 or 100 documents
of the source ``planted``. The control are passages of held-out documents, which stay where they
are and occur in no training text. ``plants.json`` beside the manifest names them all.

    document = passage + rest  ->  rest, and `repeats` times passage

What a passage, its count and the place of each copy are depends on ids and the seed alone. After
Carlini et al. 2022 (arXiv:2202.07646, section 3), who counted repeats that were there already.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from experiments.data.documents import (
    MANIFEST_FORMAT,
    MANIFEST_NAME,
    CorpusError,
    Document,
    read_manifest,
    read_shard,
    write_json,
    write_shard,
)
from experiments.data.store import check_heldout_fraction, is_held_out

PLANTS_NAME = "plants.json"
PLANTS_FORMAT = 1
SOURCE = "planted"
MOST_HELD_OUT = 0.5  # no copy is held out at any fraction up to this one


@dataclasses.dataclass(frozen=True)
class PlantConfig:
    """What to plant.

    Attributes:
      repeats: copies of each passage, one group of passages for each number.
      passages: in each group, and in the control.
      characters: length of a passage, which ends at the last space before.
      seed: of the choice.
      heldout_fraction: of the token stores that will be made, at most 0.5; theirs may be larger.

    Raises:
      ValueError: a field is out of range.
    """

    repeats: tuple[int, ...] = (1, 10, 100)
    passages: int = 25
    characters: int = 1000
    seed: int = 0
    heldout_fraction: float = 0.05

    def __post_init__(self) -> None:
        if not self.repeats or min(self.repeats) < 1 or len(set(self.repeats)) < len(self.repeats):
            raise ValueError(f"repeats must be different numbers of 1 or more, got {self.repeats}")
        if self.passages < 1:
            raise ValueError(f"passages must be at least 1, got {self.passages}")
        if self.characters < 16:
            raise ValueError(f"characters must be at least 16, got {self.characters}")
        check_heldout_fraction(self.heldout_fraction)
        if self.heldout_fraction > MOST_HELD_OUT:
            raise ValueError(
                f"heldout_fraction must be at most {MOST_HELD_OUT}, got {self.heldout_fraction}"
            )


@dataclasses.dataclass(frozen=True)
class Plant:
    """A passage and how often it occurs in the training text.

    Attributes:
      document: id of the document that it comes from.
      start: its first character there.
      source: of that document.
      text: the passage.
      repeats: copies in the training text; 0 for the control, which is held out.
    """

    document: str
    start: int
    source: str
    text: str
    repeats: int

    def copies(self, seed: int) -> Iterator[tuple[float, Document]]:
        """Each copy with its place among all copies, in [0, 1).

        The places of one passage are spread evenly, with jitter: no window of a training batch
        should show a passage twice.
        """
        for copy in range(self.repeats):
            name = f"{SOURCE}/{self.document}/{copy}"
            suffix = 0
            while is_held_out(f"{name}.{suffix}", MOST_HELD_OUT):
                suffix += 1
            jitter = _hash(f"{seed} place {name}") / 2.0**64
            yield (copy + jitter) / self.repeats, Document(f"{name}.{suffix}", SOURCE, self.text)


def choose_plants(documents: Iterable[Document], config: PlantConfig) -> list[Plant]:
    """The passages to plant, by group, and the control.

    Args:
      documents: of the corpus; read once.
      config: how many.

    Raises:
      ValueError: the corpus has too few documents that are long enough.
    """
    train: list[Plant] = []
    control: list[Plant] = []
    for document in documents:
        for start, end in pieces(document.text, config.characters):
            plant = Plant(document.id, start, document.source, document.text[start:end], 0)
            if is_held_out(document.id, config.heldout_fraction):
                control.append(plant)
                continue
            train.append(plant)
            break  # one of each document, and the rest of the document stays whole
    wanted = config.passages * len(config.repeats)
    for found, least, side in ((train, wanted, "train"), (control, config.passages, "held-out")):
        if len(found) < least:
            raise ValueError(
                f"passages={config.passages} needs {least} passages of {config.characters} "
                f"characters on the {side} side, the corpus has {len(found)}: ask for fewer or "
                "shorter ones"
            )

    def rank(plant: Plant) -> int:
        return _hash(f"{config.seed} {plant.document}#{plant.start}")

    groups = len(config.repeats)
    chosen = [
        dataclasses.replace(plant, repeats=config.repeats[index % groups])
        for index, plant in enumerate(sorted(train, key=rank)[:wanted])
    ]
    chosen.sort(key=lambda plant: plant.repeats)
    return sorted(control, key=rank)[: config.passages] + chosen


def pieces(text: str, characters: int) -> Iterator[tuple[int, int]]:
    """Disjoint passages of at most ``characters``, and at least half of that, from the start on.

    Each ends before a space; a text that has none in the second half of a passage ends the search.

    >>> list(pieces("the quick brown fox jumps", 12))
    [(0, 9), (10, 19)]
    """
    start = 0
    while start + characters <= len(text):
        end = max(text.rfind(space, start, start + characters + 1) for space in " \n")
        if end < start + characters // 2:
            return
        yield start, end
        start = end + 1


def plant(documents: Iterable[Document], plants: Iterable[Plant]) -> Iterator[Document]:
    """The documents without the passages that are planted; one that is left empty goes."""
    taken = {p.document: p for p in plants if p.repeats}
    for document in documents:
        passage = taken.get(document.id)
        if passage is None:
            yield document
            continue
        end = passage.start + len(passage.text)
        rest = (document.text[: passage.start] + document.text[end:]).strip()
        if rest:
            yield dataclasses.replace(document, text=rest)


def copies(plants: Iterable[Plant], seed: int) -> list[Document]:
    """Every copy of every planted passage, mixed."""
    placed = [pair for one in plants for pair in one.copies(seed)]
    return [document for _, document in sorted(placed, key=lambda pair: (pair[0], pair[1].id))]


def plant_corpus(directory: Path, out: Path, config: PlantConfig) -> list[Plant]:
    """Writes a corpus with planted passages, and their list, into the folder ``out``.

    Raises:
      CorpusError: ``directory`` holds no corpus.
      ValueError: ``out`` is ``directory``, or the corpus is too small.
    """
    if out.resolve() == directory.resolve():
        raise ValueError(f"out must be another folder than the corpus, got {out}")
    manifest = read_manifest(directory)
    files = [(entry, directory / entry["file"]) for entry in manifest["sources"]]
    plants = choose_plants((d for _, file in files for d in read_shard(file)), config)
    out.mkdir(parents=True, exist_ok=True)
    (out / MANIFEST_NAME).unlink(missing_ok=True)  # no manifest may describe other shards
    entries = [_write(out, entry, plant(read_shard(file), plants)) for entry, file in files]
    entry = {
        "name": SOURCE,
        "title": "passages of the other sources, repeated",
        "group": SOURCE,
        "package": "python -m experiments.data plant",
        "version": f"seed {config.seed}",
        "licence": "; ".join(sorted({entry["licence"] for entry in entries})),
        "file": f"{SOURCE}.jsonl.zst",
    }
    entries.append(_write(out, entry, copies(plants, config.seed)))
    write_plants(out / PLANTS_NAME, plants, config)
    name = f"{manifest['name']}-planted"
    write_json(out / MANIFEST_NAME, {"format": MANIFEST_FORMAT, "name": name, "sources": entries})
    return plants


def _write(out: Path, entry: dict[str, Any], documents: Iterable[Document]) -> dict[str, Any]:
    digest = write_shard(out / entry["file"], documents)
    counts = {"documents": digest.documents, "bytes": digest.bytes, "sha256": digest.hexdigest()}
    return entry | counts


def write_plants(path: Path, plants: list[Plant], config: PlantConfig) -> None:
    """Writes ``plants.json``."""
    value = {
        "format": PLANTS_FORMAT,
        "config": dataclasses.asdict(config),
        "plants": [dataclasses.asdict(one) for one in plants],
    }
    write_json(path, value)


def read_plants(path: Path) -> tuple[list[Plant], PlantConfig]:
    """The passages of a ``plants.json``.

    Raises:
      CorpusError: it is missing or of another format.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if value["format"] != PLANTS_FORMAT:
            raise ValueError(f"format {value['format']}, want {PLANTS_FORMAT}")
        config = value["config"] | {"repeats": tuple(value["config"]["repeats"])}
        return [Plant(**one) for one in value["plants"]], PlantConfig(**config)
    except FileNotFoundError:
        raise CorpusError(
            f"{path}: no such list of passages: make one with `python -m experiments.data plant`"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CorpusError(f"{path}: no list of planted passages ({error!r})") from None


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
