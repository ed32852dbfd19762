"""Context extension for RoPE: which frequencies a model uses beyond its trained length.

With ω_i = theta ** (-2 i / R), R the rotated dims of a head, L the trained length and s the factor:

    linear    ω_i / s                                       position interpolation, arXiv:2306.15595
    ntk       base frequencies of theta · s ** (R / (R-2))   "NTK-aware" (bloc97, 2023)
    dynamic   the same with s replaced by s·T/L - (s-1) for a length T > L, unchanged up to L
    yarn      γ_i·ω_i/s + (1-γ_i)·ω_i, γ_i a ramp over i, and cos, sin times m: arXiv:2309.00071
    llama3    ω_i for wavelengths below L/high, ω_i/s above L/low, a blend between: Llama 3.1
    longrope  ω_i / short_i for T <= L, ω_i / long_i beyond, and cos, sin times m: arXiv:2402.13753

Everything here is float64 on the host; `models.rope` turns it into float32 phases.
"""

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

import numpy as np

RopeType = Literal["linear", "ntk", "dynamic", "yarn", "llama3", "longrope"]

_REQUIRED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor", "original_max_seq_len"),
    "yarn": ("factor", "original_max_seq_len"),
    "llama3": ("factor", "original_max_seq_len", "low_freq_factor", "high_freq_factor"),
    "longrope": ("original_max_seq_len", "short_factor", "long_factor"),
}
_OPTIONAL: dict[str, dict[str, object]] = {
    "yarn": {"attention_factor": None, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True},
    "longrope": {"attention_factor": None, "factor": None},
}


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """One context extension; see the module docstring for what each type does.

    Args:
        type: "linear", "ntk", "dynamic", "yarn", "llama3" or "longrope".
        factor: s, extended over trained length, at least 1. For longrope only the default of
            `attention_factor` reads it.
        original_max_seq_len: L, the length before extension (dynamic, yarn, llama3, longrope).
        attention_factor: m, which multiplies cos and sin, so logits see m². None is the paper's:
            0.1 ln s + 1 for yarn, sqrt(1 + ln s / ln L) for longrope.
        beta_fast, beta_slow: turns within L between which yarn's ramp lies: 32 and 1.
        truncate: yarn's ramp begins and ends at whole dimensions.
        low_freq_factor, high_freq_factor: the ends of llama3's blend, in turns within L.
        short_factor, long_factor: longrope's divisors, one for each of the R/2 frequencies.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field is missing, out of range, or has no effect for the type.
    """

    type: RopeType
    factor: float | None = None
    original_max_seq_len: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.type not in get_args(RopeType):
            raise ValueError(f"rope type must be one of {get_args(RopeType)}, got {self.type!r}.")
        self._fill_and_match_type()
        for name in ("factor", "attention_factor", "beta_fast", "beta_slow"):
            self._check_positive(name)
        for name in ("low_freq_factor", "high_freq_factor", "original_max_seq_len"):
            self._check_positive(name)
        if self.factor is not None and self.factor < 1:
            raise ValueError(f"factor must be at least 1, got {self.factor}: it extends a context.")
        self._check_orders()
        for name in ("short_factor", "long_factor"):
            self._check_divisors(name)

    def _fill_and_match_type(self) -> None:
        """Defaults of the type; what it needs must be there, and what it ignores must not."""
        optional = _OPTIONAL.get(self.type, {})
        for name, default in optional.items():
            if getattr(self, name) is None and default is not None:
                object.__setattr__(self, name, default)
        known = {"type", *_REQUIRED[self.type], *optional}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _REQUIRED[self.type] and value is None:
                raise ValueError(f"rope type {self.type!r} needs {field.name}; give it.")
            if field.name not in known and value is not None:
                raise ValueError(
                    f"{field.name}={value!r} has no effect for rope type {self.type!r}; "
                    "leave it out."
                )

    def _check_positive(self, name: str) -> None:
        value = getattr(self, name)
        if value is None:
            return
        kind = int if name == "original_max_seq_len" else int | float
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{name} must be a number, got {value!r} of {type(value).__name__}.")
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be finite and above 0, got {value}.")

    def _check_orders(self) -> None:
        if self.truncate is not None and not isinstance(self.truncate, bool):
            raise TypeError(f"truncate must be True or False, got {self.truncate!r}.")
        for low, high in (("beta_slow", "beta_fast"), ("low_freq_factor", "high_freq_factor")):
            below, above = getattr(self, low), getattr(self, high)
            if below is not None and above is not None and below >= above:
                raise ValueError(f"{low}={below} must be below {high}={above}.")

    def _check_divisors(self, name: str) -> None:
        value = getattr(self, name)
        if value is None:
            return
        divisors = tuple(float(v) for v in value)
        if not divisors or not all(math.isfinite(v) and v > 0 for v in divisors):
            raise ValueError(f"{name} must hold finite numbers above 0, got {value!r}.")
        object.__setattr__(self, name, divisors)  # a list read from JSON would not hash

    @property
    def cos_sin_factor(self) -> float:
        """m: `attention_factor`, or the paper's value where it is None; 1 for other types.

        >>> RopeScaling(type="yarn", factor=4.0, original_max_seq_len=32768).cos_sin_factor
        1.138629436111989
        """
        if self.type not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return float(self.attention_factor)
        if self.factor is None or self.factor <= 1:
            return 1.0
        if self.type == "yarn":
            return 0.1 * math.log(self.factor) + 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(_given(self.original_max_seq_len)))

    def check_dims(self, rotary_dim: int) -> None:
        """That the scaling fits R = `rotary_dim` rotated dims of a head.

        Raises:
            ValueError: a list of divisors has another length than R/2, or R = 2 for an NTK type.
        """
        for name in ("short_factor", "long_factor"):
            divisors = getattr(self, name)
            if divisors is not None and len(divisors) != rotary_dim // 2:
                raise ValueError(
                    f"rope_scaling.{name} has {len(divisors)} entries, but {rotary_dim} rotated "
                    f"dims have {rotary_dim // 2} frequencies; give one for each."
                )
        if self.type in ("ntk", "dynamic") and rotary_dim < 4:
            raise ValueError(
                f"rope type {self.type!r} raises theta by the power R/(R-2) and needs R of at "
                f"least 4 rotated dims, got {rotary_dim}."
            )


def scaled_frequencies(
    rotary_dim: int, theta: float, scaling: RopeScaling | None, *, seq_len: int
) -> np.ndarray:
    """Radians a token of every rotated pair: float64 `[R/2]`, on the host.

    Args:
        rotary_dim: R, rotated dims of a head.
        theta: base of the frequencies.
        scaling: the extension, or None.
        seq_len: T, the length that "dynamic" and "longrope" choose by. One length serves a whole
            sequence: keys that were cached under another one do not fit.

    >>> scaled_frequencies(4, 10_000.0, RopeScaling(type="linear", factor=2.0), seq_len=1).tolist()
    [0.5, 0.005]
    """
    if scaling is None:
        return _base(rotary_dim, theta)
    scaling.check_dims(rotary_dim)
    if scaling.type == "longrope":
        trained = seq_len <= _given(scaling.original_max_seq_len)
        divisors = scaling.short_factor if trained else scaling.long_factor
        return _base(rotary_dim, theta) / np.asarray(divisors, np.float64)
    factor = _given(scaling.factor)
    if scaling.type == "linear":
        return _base(rotary_dim, theta) / factor
    if scaling.type in ("ntk", "dynamic"):
        return _base(rotary_dim, raised_theta(rotary_dim, theta, scaling, seq_len=seq_len))
    kept = (_kept_by_yarn if scaling.type == "yarn" else _kept_by_llama3)(
        rotary_dim, theta, scaling
    )
    base = _base(rotary_dim, theta)
    return kept * base + (1 - kept) * base / factor


def raised_theta(rotary_dim: int, theta: float, scaling: RopeScaling, *, seq_len: int) -> float:
    """The theta that "ntk" or "dynamic" puts in place of `theta`.

    >>> scaling = RopeScaling(type="ntk", factor=8.0)
    >>> round(raised_theta(128, 10_000.0, scaling, seq_len=1), 2)
    82684.62
    """
    stretch = _given(scaling.factor)
    if scaling.type == "dynamic":
        trained = _given(scaling.original_max_seq_len)
        stretch = stretch * max(seq_len, trained) / trained - (stretch - 1)
    return theta * stretch ** (rotary_dim / (rotary_dim - 2))


def _base(rotary_dim: int, theta: float) -> np.ndarray:
    return theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)


def _kept_by_yarn(rotary_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """1 - γ: the share of each frequency that is not interpolated."""

    def dimension(turns: float) -> float:
        """Where a pair makes that many turns within the trained length."""
        wavelength = _given(scaling.original_max_seq_len) / (turns * 2 * math.pi)
        return rotary_dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = dimension(_given(scaling.beta_fast)), dimension(_given(scaling.beta_slow))
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low if high != low else 0.001
    return 1 - np.clip((np.arange(rotary_dim // 2) - low) / width, 0, 1)


def _kept_by_llama3(rotary_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """1 where a wave turns `high` times within L, 0 where below `low` times, linear between."""
    low, high = _given(scaling.low_freq_factor), _given(scaling.high_freq_factor)
    turns = _given(scaling.original_max_seq_len) * _base(rotary_dim, theta) / (2 * math.pi)
    return np.clip((turns - low) / (high - low), 0, 1)


def _given(value: float | None) -> float:
    assert value is not None, "RopeScaling checks what its type needs"
    return value
