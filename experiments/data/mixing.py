r"""How much of each source, and in which order: shares, epoch caps, a random-access schedule.

Shares are of *tokens*. They come from explicit weights, or from the sizes n_i by temperature,

    p_i = n_i^(1/T) / sum_j n_j^(1/T)       (T = 1 proportional, T -> infinity uniform),

times a multiplier per source, and are then capped: a source seen more than N epochs gives its
excess to the others in proportion to their shares. With uniform shares this is UniMax (Chung
et al. 2023, 2304.09151).

The schedule is deterministic and exact. Shares become integers c_i with sum P, and a table of
P places is dealt by earliest deadline (Tijdeman 1980, "The chairman assignment problem"): after
n rows each of k sources has had n p_i +- (1 - 1/(2k - 2)) rows, so every window of rows is
within 2 of its share (1 for two sources), and every P rows are exact. Within 1 in every window
is not possible in general: for 8/11, 2/11, 1/11 no sequence of period 11 has it. For short
periods it is searched for, and taken where it is found (all of ``RECIPES``).
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np
from jaxtyping import Int32, Int64

DEFAULT_PERIOD = 1 << 14
SEARCHED_PERIOD = 100  # a search for a balanced order beyond this hardly ever ends well
SEARCHED_NODES = 5_000

RECIPES: dict[str, dict[str, float]] = {
    "web": {"web": 0.80, "code": 0.10, "books": 0.05, "curated": 0.05},
    "code": {"web": 0.40, "code": 0.50, "books": 0.05, "curated": 0.05},
}


@dataclasses.dataclass(frozen=True)
class MixConfig:
    """How the sources are mixed.

    Attributes:
      recipe: a name in ``RECIPES``, whose shares are of groups of sources.
      shares: of groups, as in a recipe; they sum to 1. Without either, shares follow the sizes.
      temperature: T of the sizes, over all sources, or within each group of a recipe.
      multipliers: by source; shares are scaled by them and then sum to 1 again.
      max_epochs: a source is not seen more often than this over ``budget_tokens``.
      budget_tokens: tokens of the training run that the cap is for.
      period: P, at most; shares are multiples of 1/P. Fewer when the shares are exact in fewer.
    """

    recipe: str | None = None
    shares: dict[str, float] | None = None
    temperature: float = 1.0
    multipliers: dict[str, float] = dataclasses.field(default_factory=dict)
    max_epochs: float | None = None
    budget_tokens: float | None = None
    period: int = DEFAULT_PERIOD

    def __post_init__(self) -> None:
        if self.recipe is not None and self.recipe not in RECIPES:
            raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, got {self.recipe!r}")
        if self.recipe is not None and self.shares is not None:
            raise ValueError("give a recipe or shares, not both")
        if self.shares is not None:
            _check_shares(self.shares)
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")
        for name, value in self.multipliers.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"multipliers.{name} must be finite and >= 0, got {value}")
        if (self.max_epochs is None) != (self.budget_tokens is None):
            raise ValueError("max_epochs and budget_tokens belong together: give both or neither")
        for name in ("max_epochs", "budget_tokens"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if not 1 <= self.period <= 1 << 22:
            raise ValueError(f"period must lie in [1, 2^22], got {self.period}")

    @property
    def group_shares(self) -> dict[str, float] | None:
        """The shares of groups, from the recipe or as given."""
        return RECIPES[self.recipe] if self.recipe is not None else self.shares


def _check_shares(shares: Mapping[str, float]) -> None:
    for name, share in shares.items():
        if not 0 <= share <= 1:
            raise ValueError(f"shares.{name} must lie in [0, 1], got {share}")
    if abs(sum(shares.values()) - 1) > 1e-6:
        raise ValueError(f"shares must sum to 1, got {sum(shares.values()):.6g}")


def temperature_shares(sizes: Mapping[str, float], temperature: float) -> dict[str, float]:
    """``n^(1/T)``, normalised; relative to the largest, so that no power overflows.

    A source without tokens gets none.

    >>> temperature_shares({"en": 400, "de": 100}, 1.0)
    {'en': 0.8, 'de': 0.2}
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if bad := [name for name, size in sizes.items() if size < 0]:
        raise ValueError(f"sizes must not be negative: {', '.join(bad)}")
    top = max(sizes.values(), default=0)
    if not top > 0:
        raise ValueError("no source holds any tokens")
    weights = {name: (size / top) ** (1 / temperature) for name, size in sizes.items()}
    total = math.fsum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def cap_epochs(
    shares: Mapping[str, float], sizes: Mapping[str, float], *, budget: float, max_epochs: float
) -> dict[str, float]:
    """Shares with ``p_i * budget <= max_epochs * n_i``; the excess goes to the others.

    Raises:
      ValueError: the sources with a share do not hold ``budget / max_epochs`` tokens.
    """
    wanted = {name: share for name, share in shares.items() if share > 0}
    caps = {name: max_epochs * sizes[name] / budget for name in wanted}
    if math.fsum(caps.values()) < 1 - 1e-12:
        available = max_epochs * sum(sizes[name] for name in wanted)
        raise ValueError(
            f"budget_tokens = {budget:.4g} is more than max_epochs = {max_epochs:g} epochs of the "
            f"mixed sources give ({available:.4g}): lower the budget or raise max_epochs"
        )
    result = dict.fromkeys(shares, 0.0)
    free = dict(wanted)
    left = 1.0
    while free:
        total = math.fsum(free.values())
        over = [name for name in free if free[name] / total * left >= caps[name]]
        if not over:
            return result | {name: share / total * left for name, share in free.items()}
        for name in over:
            result[name] = caps[name]
            left -= caps[name]
            del free[name]
        left = max(0.0, left)
    return result


def mix_shares(
    sizes: Mapping[str, int], groups: Mapping[str, str], config: MixConfig
) -> dict[str, float]:
    """The share of every source, from its tokens and its group.

    Args:
      sizes: tokens by source.
      groups: the group of each source.
      config: the recipe.

    Raises:
      ValueError: a recipe's group has no tokens, a multiplier names no source, or the budget
        is out of reach.
    """
    if unknown := sorted(set(config.multipliers) - set(sizes)):
        raise ValueError(
            f"mix.multipliers names no source: {', '.join(unknown)}; known: {', '.join(sizes)}"
        )
    if config.group_shares is None:
        shares = temperature_shares(sizes, config.temperature)
    else:
        shares = _within_groups(sizes, groups, config)
    scaled = {name: share * config.multipliers.get(name, 1.0) for name, share in shares.items()}
    total = math.fsum(scaled.values())
    if not total > 0:
        raise ValueError("the multipliers leave no source a share")
    shares = {name: share / total for name, share in scaled.items()}
    if config.max_epochs is not None and config.budget_tokens is not None:
        shares = cap_epochs(
            shares, sizes, budget=config.budget_tokens, max_epochs=config.max_epochs
        )
    return shares


def _within_groups(
    sizes: Mapping[str, int], groups: Mapping[str, str], config: MixConfig
) -> dict[str, float]:
    assert config.group_shares is not None
    shares = dict.fromkeys(sizes, 0.0)
    for group, share in config.group_shares.items():
        inside = {name: size for name, size in sizes.items() if groups[name] == group}
        if share > 0 and not any(inside.values()):
            raise ValueError(
                f"mix: group {group!r} has a share of {share:g} but no tokens; groups with "
                f"sources: {', '.join(sorted(set(groups.values())))}"
            )
        if share > 0:
            within = temperature_shares(inside, config.temperature)
            shares |= {name: share * part for name, part in within.items()}
    return shares


def integer_shares(shares: Sequence[float], *, period: int = DEFAULT_PERIOD) -> tuple[int, ...]:
    """Counts per period: exact in the smallest period where they can be, else rounded to 1/P.

    Rounding is by largest remainder, and a positive share is never rounded to nothing.

    >>> integer_shares([0.8, 0.1, 0.05, 0.05])
    (16, 2, 1, 1)
    """
    if min(shares) < 0 or abs(math.fsum(shares) - 1) > 1e-6:
        raise ValueError(f"shares must be non-negative and sum to 1, got {list(shares)}")
    fractions = [Fraction(share).limit_denominator(1000) for share in shares]
    common = math.lcm(*(fraction.denominator for fraction in fractions))
    exact = max(abs(float(f) - s) for f, s in zip(fractions, shares, strict=True)) < 1e-12
    if exact and sum(fractions) == 1 and common <= period:
        return tuple(int(fraction * common) for fraction in fractions)
    if sum(share > 0 for share in shares) > period:
        raise ValueError(f"period {period} is less than the number of sources {len(shares)}")
    wanted = np.asarray(shares, dtype=np.float64) * period
    counts = np.floor(wanted).astype(np.int64)
    counts[(counts == 0) & (wanted > 0)] = 1
    while (missing := period - int(counts.sum())) != 0:
        step = 1 if missing > 0 else -1
        slack = np.where(counts + step >= (wanted > 0), step * (wanted - counts), -np.inf)
        slack[wanted == 0] = -np.inf
        counts[int(np.argmax(slack))] += step
    return tuple(counts.tolist())


def interleave(counts: Sequence[int]) -> Int32[np.ndarray, " P"]:
    """A sequence of ``sum(counts)`` sources that keeps their shares in every window.

    A balanced one (within 1 of the share in every window) where a short search finds it, else
    by earliest deadline: source i's j-th place (from 1) may be taken from step
    ceil((j - 1 + d) P / c_i) on and must be by step floor((j - d) P / c_i) + 1, where
    d = 1 / (2k - 2); of those that may, the one that must be earliest. Ties: the lower index.

    >>> interleave([2, 1, 1]).tolist()
    [0, 1, 2, 0]
    """
    active = [source for source, count in enumerate(counts) if count > 0]
    period = sum(counts)
    if not active:
        raise ValueError("at least one count must be positive")
    if len(active) == 1:
        return np.full(period, active[0], dtype=np.int32)
    if period <= SEARCHED_PERIOD and (balanced := _balanced(counts)) is not None:
        return balanced
    return _earliest_deadline(counts, active)


def _earliest_deadline(counts: Sequence[int], active: Sequence[int]) -> np.ndarray:
    period = sum(counts)
    m = 2 * len(active) - 2  # 1 / d
    waiting = [(_release(1, counts[i], period, m), i, 1) for i in active]
    heapq.heapify(waiting)
    ready: list[tuple[int, int, int]] = []
    table = np.empty(period, dtype=np.int32)
    for step in range(1, period + 1):
        while waiting and waiting[0][0] <= step:
            _, source, job = heapq.heappop(waiting)
            deadline = (job * m - 1) * period // (m * counts[source]) + 1
            heapq.heappush(ready, (deadline, source, job))
        _, source, job = heapq.heappop(ready)
        table[step - 1] = source
        if job < counts[source]:
            release = max(step + 1, _release(job + 1, counts[source], period, m))
            heapq.heappush(waiting, (release, source, job + 1))
    return table


def _balanced(counts: Sequence[int]) -> np.ndarray | None:
    """A depth-first search, the source with the largest deficit first; None when it gives up.

    With D_i(n) = rows of i in the first n steps minus their share, a window from a to b deviates
    by D_i(b) - D_i(a): all are within 1 exactly if max D_i - min D_i <= 1. In integers, times P.
    """
    period = sum(counts)
    shares = np.asarray(counts, dtype=np.int64)
    path: list[int] = []
    low, high = [np.zeros_like(shares)], [np.zeros_like(shares)]
    deviation = [np.zeros_like(shares)]
    choices: list[list[int]] = []
    for _ in range(SEARCHED_NODES):
        if len(path) == period:
            return np.array(path, dtype=np.int32)
        if len(choices) == len(path):
            due = deviation[-1] - shares  # a source in debt by P or more must come next
            order = np.argsort(due, kind="stable")
            choices.append([int(i) for i in order if counts[i] > 0][::-1])
        while choices and not choices[-1]:
            choices.pop()
            if not path:
                return None
            for stack in (path, low, high, deviation):
                stack.pop()
        source = choices[-1].pop()
        step = deviation[-1] - shares
        step[source] += period
        lower, upper = np.minimum(low[-1], step), np.maximum(high[-1], step)
        if (upper - lower).max() <= period:
            path.append(source)
            low.append(lower)
            high.append(upper)
            deviation.append(step)
    return None


def _release(job: int, count: int, period: int, m: int) -> int:
    return -(-((job - 1) * m + 1) * period // (m * count))


@dataclasses.dataclass(frozen=True)
class MixtureSchedule:
    """Row index -> (source, how many rows of that source came before), in O(1).

    Attributes:
      counts: rows of each source per period.
    """

    counts: tuple[int, ...]
    _table: np.ndarray = dataclasses.field(init=False, repr=False, compare=False)
    _rank: np.ndarray = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        table = interleave(self.counts)
        rank = np.empty(len(table), dtype=np.int64)
        for source in range(len(self.counts)):
            places = np.flatnonzero(table == source)
            rank[places] = np.arange(len(places))
        object.__setattr__(self, "_table", table)
        object.__setattr__(self, "_rank", rank)

    @property
    def period(self) -> int:
        return len(self._table)

    def at(
        self, indices: Int64[np.ndarray, " n"]
    ) -> tuple[Int32[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """The source of each row, and the row's number within that source, from 0."""
        indices = np.asarray(indices, dtype=np.int64)
        if indices.size and indices.min() < 0:
            raise ValueError(f"row indices must not be negative, got {indices.min()}")
        periods, places = np.divmod(indices, self.period)
        sources = self._table[places]
        return sources, periods * np.asarray(self.counts)[sources] + self._rank[places]
