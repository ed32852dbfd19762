"""What a model does beyond the length that it was trained on, with and without RoPE scaling.

    python -m experiments.evaluate long_context --model runs/tiny --multiples 1 2 4
    python -m experiments.evaluate long_context --model runs/short --extended runs/longer

Of every variant (the model as it is, and under linear interpolation, NTK and YaRN by the largest
multiple of its trained length L; `--extended` models as they are):

* the held-out loss by position: mean of -log p over windows, in bins of positions. Beyond L a model
  that cannot extrapolate gets worse with every token, one that reads its context better;
* passkey retrieval (`passkey.py`): share of numbers that greedy decoding writes in full, by prompt
  length and depth, and the mean loss of the number's tokens.

Writes long_context.json and long_context.png to `--out`.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from experiments.data import TokenDataset, load_dataset
from experiments.evaluation.loading import LoadedModel, load_model
from experiments.evaluation.passkey import PasskeyMaker
from experiments.evaluation.token_losses import token_losses
from experiments.training.checkpoint import write_json
from experiments.training.curriculum import extension
from experiments.training.plot import scaling_label
from experiments.training.run_folder import commit, versions
from models.config import ModelConfig

Scaling = Literal["linear", "ntk", "yarn"]


@dataclass(frozen=True)
class Options:
    """What to measure.

    Raises:
      ValueError: a field is out of range; the message names it.
    """

    model: str  # run folder, Hugging Face folder or GGUF file
    extended: tuple[str, ...] = ()  # models after continued training at a longer length
    out: str = "runs/long_context"  # folder of the result
    scalings: tuple[Scaling, ...] = ("linear", "ntk", "yarn")  # tried on `model`
    trained_len: int | None = None  # L; None: as the run says
    multiples: tuple[int, ...] = (1, 2, 4)  # prompt lengths in L, and the largest for the loss
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the passkey
    trials: int = 20  # prompts of a length and depth
    windows: int = 32  # held-out windows of the longest length, at most
    bins: int = 32  # of positions
    batch_size: int = 4  # sequences at a time
    seed: int = 0  # of the prompts
    corpus: str | None = None  # held-out text; None: of the run
    vocab_size: int | None = None  # of the corpus's tokenizer; None: of the run
    attention: str | None = None  # attention implementation; None: the fastest of the device

    def __post_init__(self) -> None:
        for name in ("trials", "windows", "bins", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.multiples or min(self.multiples) < 1:
            raise ValueError(f"multiples must be whole numbers from 1, got {self.multiples}")
        if not self.depths or not all(0 <= d <= 1 for d in self.depths):
            raise ValueError(f"depths must lie in [0, 1], got {self.depths}")


@dataclass(frozen=True)
class Variant:
    """A model to measure and the name that it has in tables and pictures."""

    name: str
    config: ModelConfig
    params: Any


def run(options: Options) -> int:
    """Measure, write the result and its picture, and print a table."""
    from experiments.evaluation.long_context_picture import draw

    loaded = load_model(options.model)
    extended = {path: load_model(path) for path in options.extended}
    dataset = dataset_for(loaded, options)
    length = options.trained_len or loaded.trained_len
    result = measure(make_variants(loaded, extended, length, options), dataset, length, options)
    result |= {"options": asdict(options), "versions": versions(), "commit": commit()}
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "long_context.json", result)
    draw(result, out / "long_context.png")
    print(f"{table(result)}\n{out / 'long_context.json'}\n{out / 'long_context.png'}")
    return 0


def dataset_for(loaded: LoadedModel, options: Options) -> TokenDataset:
    """The corpus of the options, or the one that the model was trained on.

    Raises:
      ValueError: neither is known, or its tokens are not the model's.
    """
    corpus = options.corpus or (loaded.data and loaded.data.corpus)
    vocab = options.vocab_size or (loaded.data and loaded.data.vocab_size)
    if corpus is None or vocab is None:
        raise ValueError("corpus and vocab_size: a model that is no run of ours needs both")
    if vocab > loaded.config.vocab_size:
        raise ValueError(
            f"vocab_size {vocab} of the corpus is above the model's {loaded.config.vocab_size}"
        )
    return load_dataset(corpus, vocab_size=vocab)


def make_variants(
    loaded: LoadedModel, extended: dict[str, LoadedModel], length: int, options: Options
) -> list[Variant]:
    """The model as it is, under every scaling, and the models after continued training.

    Raises:
      ValueError: the model is scaled already, so that another scaling would be on top of it.
    """
    longest = length * max(options.multiples)

    def variant(name: str, config: ModelConfig, params: Any, **changes: Any) -> Variant:
        room = max(longest, config.max_seq_len)
        config = replace(config, max_seq_len=room, attention_implementation=options.attention)
        return Variant(name, replace(config, **changes), params)

    variants = [variant("as trained", loaded.config, loaded.params)]
    factor = max(options.multiples)
    if loaded.config.rope_scaling is not None and options.scalings:
        raise ValueError(
            f"scalings: {options.model} has a rope_scaling of type "
            f"{loaded.config.rope_scaling.type!r} already; give --scalings without values"
        )
    for rope in options.scalings if factor > 1 else ():
        scaling = extension(rope, factor, length)
        name = scaling_label(scaling)
        variants.append(variant(name, loaded.config, loaded.params, rope_scaling=scaling))
    for path, model in extended.items():
        variants.append(variant(f"{Path(path).name}, trained on", model.config, model.params))
    return variants


def measure(
    variants: list[Variant], dataset: TokenDataset, trained_len: int, options: Options
) -> dict[str, Any]:
    """Both measurements of every variant, as JSON values.

    Raises:
      ValueError: the held-out text is shorter than one window of the longest length, or the
        sentences of a passkey prompt do not fit the shortest.
    """
    lengths = sorted(trained_len * m for m in set(options.multiples))
    heldout = dataset.heldout_batches(1, lengths[-1], options.windows * lengths[-1])
    windows = np.concatenate(heldout)
    maker = PasskeyMaker(dataset.heldout, dataset.tokenizer)
    rows = []
    for variant in variants:
        rows.append(
            {
                "name": variant.name,
                "rope_theta": variant.config.rope_theta,
                "rope_scaling": plain_scaling(variant.config),
                "positions": position_losses(variant, windows, options),
                "passkey": [
                    passkey_cell(variant, maker, length, depth, options)
                    for length in lengths
                    for depth in options.depths
                ],
            }
        )
    return {
        "trained_len": trained_len,
        "lengths": lengths,
        "depths": list(options.depths),
        "corpus": dataset.name,
        "fingerprint": dataset.fingerprint,
        "windows": len(windows),
        "variants": rows,
        "device_kind": jax.devices()[0].device_kind,
    }


def plain_scaling(config: ModelConfig) -> dict[str, Any] | None:
    """The fields of a config's `rope_scaling` that are set."""
    if config.rope_scaling is None:
        return None
    return {k: v for k, v in asdict(config.rope_scaling).items() if v is not None}


def score(variant: Variant, tokens: np.ndarray, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """`token_losses` of many sequences, some at a time; the last batch is filled up and cut."""
    size = min(batch_size, len(tokens))
    parts = []
    for first in range(0, len(tokens), size):
        rows = np.arange(first, first + size) % len(tokens)
        parts.append(jax.device_get(token_losses(variant.config, variant.params, tokens[rows])))
    nll, hits = (np.concatenate(x)[: len(tokens)] for x in zip(*parts, strict=True))
    if not np.isfinite(nll).all():
        raise ValueError(
            f"{variant.name}: {int((~np.isfinite(nll)).sum())} of {nll.size} losses are not "
            "finite; the model or the corpus is not what it should be"
        )
    return nll, hits


def position_losses(variant: Variant, windows: np.ndarray, options: Options) -> dict[str, Any]:
    """Mean loss in bins of positions with its standard error over windows.

    Edges are positions: bin i holds targets edges[i] .. edges[i+1] - 1.
    """
    nll, _ = score(variant, windows, options.batch_size)
    count = min(options.bins, nll.shape[1])
    edges = np.arange(count + 1) * nll.shape[1] // count
    means = np.add.reduceat(nll.astype(np.float64), edges[:-1], axis=1) / np.diff(edges)
    errors = means.std(axis=0, ddof=1) / np.sqrt(len(means)) if len(means) > 1 else None
    return {
        "edges": edges.tolist(),
        "loss": means.mean(axis=0).tolist(),
        "standard_error": None if errors is None else errors.tolist(),
    }


def passkey_cell(
    variant: Variant, maker: PasskeyMaker, length: int, depth: float, options: Options
) -> dict[str, Any]:
    """Retrieval at one prompt length and depth."""
    tokens, answers = maker.batch(length, depth, options.trials, options.seed)
    nll, hits = score(variant, tokens, options.batch_size)
    found = [bool(h[-n:].all()) for h, n in zip(hits, answers, strict=True)]
    losses = [float(x[-n:].mean()) for x, n in zip(nll, answers, strict=True)]
    return {
        "length": length,
        "depth": depth,
        "accuracy": float(np.mean(found)),
        "answer_loss": float(np.mean(losses)),
        "trials": options.trials,
    }


def summary(variant: dict[str, Any], result: dict[str, Any]) -> dict[str, float]:
    """Mean loss within and beyond L, and passkey accuracy by prompt length."""
    edges, loss = np.array(variant["positions"]["edges"]), np.array(variant["positions"]["loss"])
    inside = edges[1:] <= result["trained_len"]
    widths = np.diff(edges)
    row = {}
    for name, chosen in (("inside", inside), ("beyond", ~inside)):
        if chosen.any():
            row[name] = float(np.average(loss[chosen], weights=widths[chosen]))
    for length in result["lengths"]:
        cells = [c["accuracy"] for c in variant["passkey"] if c["length"] == length]
        row[f"passkey {length}"] = float(np.mean(cells))
    return row


def table(result: dict[str, Any]) -> str:
    """One line for each variant."""
    rows = [(v["name"], summary(v, result)) for v in result["variants"]]
    names = list(rows[0][1])
    width = max(len(name) for name, _ in rows)
    lines = [" " * width + "".join(f"  {name:>14}" for name in names)]
    for name, row in rows:
        lines.append(f"{name:<{width}}" + "".join(f"  {row[n]:>14.3f}" for n in names))
    return "\n".join(lines)
