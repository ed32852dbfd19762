"""Plan a sweep: compute budgets -> sizes around the expected optimum -> tokens, steps, rates.

A point of the plan fixes everything a run needs, so a worker needs nothing but its point and the
token stream. For budget C and a model that costs f FLOPs per token (exact convention: 6 N plus
causal attention), it trains on D = C / f tokens. N counts blocks and head, what multiplies.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import numpy as np

from experiments.scaling.flops import parameter_count, training_flops_per_token
from experiments.training.optimizer import OptimizerConfig
from models.config import ModelConfig

PORIAN_LR, PORIAN_PARAMS = 0.0047, 108e6  # arXiv 2406.19146: lr = .0047 (N / 108M)^(-1/3)
UNROLLED_LAYERS = 4  # up to here a loop over layers costs more than the longer program
ENOUGH_BUDGETS, ENOUGH_SIZES = 3, 5  # of a plan that can be wrong about an exponent
SMOKE_NOTE = (
    f"fewer than {ENOUGH_BUDGETS} budgets and {ENOUGH_SIZES} sizes: this tests that everything "
    "works; its exponents mean little"
)
MIN_STEPS = 20  # fewer optimizer steps than this is not training


@dataclass(frozen=True)
class SweepConfig:
    """A whole sweep. Sizes are WIDTHxLAYERS, for example 64x3."""

    budgets: tuple[float, ...]  # training FLOPs of each IsoFLOP curve
    ladder: tuple[str, ...]  # sizes to choose from, small to large
    out: str = "runs/sweep"  # folder of the run; an unfinished one is continued
    corpus: str = "auto"  # "sample", a corpus folder, a token store, or auto: ./corpus if built
    vocab_size: int = 256  # 256 is bytes, more is byte-level BPE trained on the corpus
    sizes: tuple[str, ...] = ()  # train exactly these at every budget instead of choosing
    sizes_per_budget: int = 5  # how many of the ladder to choose for each budget
    tokens: tuple[float, ...] = ()  # sizes x tokens grid instead of budgets (needs sizes)
    seeds: tuple[int, ...] = (0,)  # initialisation and data order; every point runs once for each
    expected_params: float = 2e4  # N_opt expected at expected_budget: where curves are centred
    expected_budget: float = 4e11  # FLOPs
    expected_exponent: float = 0.5  # N_opt grows as C to this power
    seq_len: int = 128  # tokens a sequence
    batch_size: int = 8  # sequences a step
    head_dim: int = 16  # of every model, or the divisor of its width nearest to it
    qk_norm: bool = True  # makes the loss far less sensitive to the learning rate
    lr: float | None = None  # fixed peak learning rate; None: lr_scale times Porian's rule
    lr_scale: float = 1.0  # factor on .0047 (N / 108M)^(-1/3)
    lr_max: float = 0.02  # cap on the rule
    beta2: float = 0.99  # AdamW
    weight_decay: float = 0.1  # AdamW
    warmup_fraction: float = 0.1  # of the steps, at most; never more than N tokens
    cooldown_fraction: float = 0.2  # of the steps, 1 - sqrt
    heldout_tokens: int = 200_000  # of the fixed held-out windows that give a point its loss
    max_epochs: float = 4.0  # points that would repeat the corpus more are left out
    max_minutes: float = 6.0  # budgets are scaled down when the measured rate needs longer
    attention: str | None = None  # of pallas_flash; None: the fastest for the device
    compute_dtype: str = "float32"  # float32 or bfloat16
    workers: int = 1  # training processes
    bootstrap: int = 1000  # resamples behind the intervals
    delta: float = 1e-3  # Huber threshold of the parametric fit

    def __post_init__(self) -> None:
        for name in ("budgets", "tokens"):
            for value in getattr(self, name):
                if not (np.isfinite(value) and value > 0):
                    raise ValueError(f"{name} must be positive numbers, got {value}")
        if self.tokens and not self.sizes:
            raise ValueError("tokens needs sizes: name the models to train, e.g. --sizes 32x2 64x3")
        if not self.budgets and not self.tokens:
            raise ValueError("budgets is empty: give FLOPs, e.g. --budgets 1e11 4e11 1.6e12")
        for size in (*self.sizes, *self.ladder):
            parse_size(size)
        if not self.sizes and not self.ladder:
            raise ValueError("ladder is empty: give sizes to choose from, or --sizes")
        for name in ("seq_len", "batch_size", "head_dim", "heldout_tokens", "workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.sizes_per_budget < 3:
            raise ValueError(
                f"sizes_per_budget must be at least 3 for a parabola, got {self.sizes_per_budget}"
            )
        if not self.seeds:
            raise ValueError("seeds is empty: give at least one, e.g. --seeds 0")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds repeat: {self.seeds}")
        for name in ("warmup_fraction", "cooldown_fraction"):
            if not 0 <= getattr(self, name) <= 0.5:
                raise ValueError(f"{name} must be in [0, 0.5], got {getattr(self, name)}")
        for name in ("lr_scale", "lr_max", "max_epochs", "max_minutes", "delta"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.lr is not None and not self.lr > 0:
            raise ValueError(f"lr must be positive or None (by the rule), got {self.lr}")


@dataclass(frozen=True)
class Point:
    """One run of the sweep, complete."""

    id: str  # folder name
    budget: float | None  # planned FLOPs; None in a sizes x tokens grid
    model: ModelConfig
    optimizer: OptimizerConfig
    params: int  # N: blocks and head
    flops_per_token: float  # training, exact convention
    seq_len: int
    batch_size: int
    steps: int
    warmup_steps: int
    cooldown_steps: int
    lr: float
    seed: int
    heldout_tokens: int

    @property
    def tokens(self) -> int:
        """D: training tokens, repeats included."""
        return self.steps * self.batch_size * self.seq_len

    @property
    def flops(self) -> float:
        """Training FLOPs that are really spent; within rounding of the budget."""
        return self.tokens * self.flops_per_token

    @property
    def shape(self) -> tuple:
        """What a compiled program depends on: points of one shape share it."""
        return self.model, self.optimizer, self.seq_len, self.batch_size, self.heldout_tokens

    @classmethod
    def from_json(cls, value: dict) -> "Point":
        """The inverse of `dataclasses.asdict`."""
        model, optimizer = ModelConfig(**value["model"]), OptimizerConfig(**value["optimizer"])
        return cls(**{**value, "model": model, "optimizer": optimizer})

    def to_json(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class Plan:
    """Points in the order of the report, and why planned cells are missing."""

    points: tuple[Point, ...]
    notes: tuple[str, ...]

    @property
    def flops(self) -> float:
        return sum(p.flops for p in self.points)

    @property
    def sizes_by_budget(self) -> dict[float, set[int]]:
        """N of the models at each budget; empty for a grid of sizes and tokens."""
        found: dict[float, set[int]] = {}
        for point in self.points:
            if point.budget is not None:
                found.setdefault(point.budget, set()).add(point.params)
        return found

    @property
    def is_smoke(self) -> bool:
        """True when the plan can only show that everything runs, whatever its losses are.

        Fewer than 5 sizes cannot stand two on each side of a minimum, and fewer than 3 budgets
        cannot test a power law.
        """
        sizes = self.sizes_by_budget.values()
        return 0 < len(sizes) < ENOUGH_BUDGETS and max(map(len, sizes)) < ENOUGH_SIZES


def parse_size(size: str) -> tuple[int, int]:
    """Width and layers of a WIDTHxLAYERS name.

    >>> parse_size("64x3")
    (64, 3)
    """
    match = re.fullmatch(r"(\d+)x(\d+)", size)
    if not match or "0" in match.groups():
        raise ValueError(f"size {size!r} is not WIDTHxLAYERS, for example 64x3")
    return int(match[1]), int(match[2])


def model_of(size: str, config: SweepConfig) -> ModelConfig:
    """The decoder of a size: SwiGLU with F = 8/3 D rounded up to 8, an untied head.

    Raises:
      ValueError: the width is odd, so no even head dim divides it.
    """
    width, layers = parse_size(size)
    head_dim = _head_dim(width, config.head_dim)
    heads = width // head_dim
    return ModelConfig(
        vocab_size=config.vocab_size,
        num_layers=layers,
        d_model=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        ffn_dim=-(-8 * width // 24) * 8,
        max_seq_len=config.seq_len,
        qk_norm=config.qk_norm,
        scan_layers=layers > UNROLLED_LAYERS,
        compute_dtype=config.compute_dtype,
        attention_implementation=cast(Any, config.attention),  # checked by the model
    )


def _head_dim(width: int, wanted: int) -> int:
    """The even divisor of the width nearest, as a ratio, to the wanted head dim."""
    divisors = [h for h in range(2, width + 1, 2) if width % h == 0]
    if not divisors:
        raise ValueError(f"width {width} is odd, but RoPE needs an even head dim; use {width + 1}")
    return min(divisors, key=lambda h: (abs(np.log(h / wanted)), h))


def expected_optimum(budget: float, config: SweepConfig) -> float:
    """N_opt that the plan expects at a budget: a power law through one known optimum."""
    ratio = budget / config.expected_budget
    return config.expected_params * ratio**config.expected_exponent


def peak_learning_rate(params: int, config: SweepConfig) -> float:
    """min(lr_max, lr_scale * .0047 (N / 108M)^(-1/3)), or the fixed `lr`."""
    if config.lr is not None:
        return config.lr
    rule = PORIAN_LR * (params / PORIAN_PARAMS) ** (-1 / 3)
    return min(config.lr_max, config.lr_scale * rule)


def make_plan(config: SweepConfig, *, corpus_tokens: int) -> Plan:
    """Every point of a sweep.

    Args:
      config: the sweep.
      corpus_tokens: tokens of the training split, for the count of epochs.

    Returns:
      The plan. Points that would repeat the corpus more than `max_epochs` times, or take fewer
      than 20 steps, are left out and named in `notes`.

    Raises:
      ValueError: nothing is left to train.
    """
    points, notes = [], []
    if config.tokens:
        cells = [(None, s, t) for s in config.sizes for t in config.tokens]
    else:
        cells = [(c, s, None) for c in config.budgets for s in choose_sizes(c, config)]
    for budget, size, tokens in cells:
        for seed in config.seeds:
            point = _make_point(budget, size, tokens, seed, config)
            epochs = point.tokens / corpus_tokens
            if point.steps < MIN_STEPS:
                notes.append(f"{point.id} left out: {point.steps} steps; lower --batch-size")
            elif epochs > config.max_epochs:
                notes.append(
                    f"{point.id} left out: {point.tokens:.3g} tokens are {epochs:.1f} epochs of "
                    f"the corpus, more than --max-epochs {config.max_epochs:g}; use a larger corpus"
                )
            else:
                points.append(point)
    if not points:
        raise ValueError("no point is left to train: " + "; ".join(notes))
    most = max(p.tokens for p in points) / corpus_tokens
    notes.append(f"tokens are repeated at most {most:.2g} times (limit {config.max_epochs:g})")
    plan = Plan(tuple(points), tuple(notes))
    coverage = [SMOKE_NOTE] if plan.is_smoke else _coverage(points, config)
    return replace(plan, notes=(*notes, *coverage))


def choose_sizes(budget: float, config: SweepConfig) -> tuple[str, ...]:
    """The `sizes_per_budget` neighbours on the ladder that sit best around the expected optimum.

    Best is the window whose middle, in log N, is nearest; all of `sizes` when those are given.
    """
    if config.sizes:
        return config.sizes
    ladder = sorted(config.ladder, key=lambda s: parameter_count(model_of(s, config)))
    logs = np.log([parameter_count(model_of(size, config)) for size in ladder])
    target = np.log(expected_optimum(budget, config))
    count = min(config.sizes_per_budget, len(ladder))
    middles = [logs[i : i + count].mean() for i in range(len(ladder) - count + 1)]
    first = int(np.abs(np.array(middles) - target).argmin())
    return tuple(ladder[first : first + count])


def _make_point(
    budget: float | None, size: str, tokens: float | None, seed: int, config: SweepConfig
) -> Point:
    model = model_of(size, config)
    params = parameter_count(model)
    flops_per_token = training_flops_per_token(model, config.seq_len)
    if tokens is None:
        assert budget is not None
        tokens = budget / flops_per_token
    batch_tokens = config.batch_size * config.seq_len
    steps = round(tokens / batch_tokens)
    # A warm-up longer than the time to see N tokens starves small runs (Porian et al. 2024).
    warmup = min(round(config.warmup_fraction * steps), round(params / batch_tokens))
    label = f"D{tokens:.3g}" if budget is None else f"C{budget:.3g}"
    return Point(
        id=f"{label}-{size}-s{seed}".replace("+", ""),
        budget=budget,
        model=model,
        optimizer=OptimizerConfig(beta2=config.beta2, weight_decay=config.weight_decay),
        params=params,
        flops_per_token=flops_per_token,
        seq_len=config.seq_len,
        batch_size=config.batch_size,
        steps=steps,
        warmup_steps=warmup,
        cooldown_steps=round(config.cooldown_fraction * steps),
        lr=peak_learning_rate(params, config),
        seed=seed,
        heldout_tokens=config.heldout_tokens,
    )


def _coverage(points: Sequence[Point], config: SweepConfig) -> list[str]:
    """Notes on budgets whose sizes do not surround the expected optimum by two on each side."""
    notes = []
    for budget in config.budgets if not config.tokens else ():
        sizes = {p.params for p in points if p.budget == budget}
        middle = expected_optimum(budget, config)
        below, above = sum(n < middle for n in sizes), sum(n > middle for n in sizes)
        if min(below, above) < 2:
            notes.append(
                f"budget {budget:.3g}: {below} sizes below and {above} above the expected optimum "
                f"N = {middle:.2g}; two on each side are wanted"
            )
    return notes


def scale_budgets(config: SweepConfig, factor: float) -> SweepConfig:
    """The same sweep with every budget (or token count) multiplied by `factor`."""
    return replace(
        config,
        budgets=tuple(b * factor for b in config.budgets),
        tokens=tuple(t * factor for t in config.tokens),
    )
