"""What a run says about itself: a row of numbers for each step, and a line for people.

MFU is model FLOPs utilisation: FLOPs of the model (`experiments.scaling.flops`, convention "exact":
three forward passes, causal attention counted as half, recomputation not at all; a document mask
saves FLOPs that are counted all the same) per second, divided by the dense bfloat16 peak of the
devices.
"""

import json
import math
import resource
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from experiments.scaling.flops import training_flops_per_token
from experiments.training.checkpoint import write_atomic
from models.config import ModelConfig

MFU_CONVENTION = "exact: 3 forward passes, causal attention as half, of the dense bfloat16 peak"

# Dense bfloat16 FLOP/s by a part of the device's name, from the vendor's data sheets.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "B200": 2250e12, "A100": 312e12}


def peak_flops(device: Any) -> float | None:
    """Dense bfloat16 FLOP/s of a device, None where no data sheet gives one."""
    name = device.device_kind.upper()
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


@dataclass
class Meter:
    """Rates and resources between two rows."""

    model: ModelConfig
    devices: int
    peak: float | None
    _then: float = field(default_factory=time.perf_counter)

    def lap(self, tokens: int, seq_len: int) -> dict[str, float | None]:
        """Seconds since the last row, and the rates that they amount to."""
        now = time.perf_counter()
        seconds, self._then = now - self._then, now
        rate = tokens / max(seconds, 1e-9)
        flops = training_flops_per_token(self.model, seq_len) * rate
        mfu = flops / (self.peak * self.devices) if self.peak else None
        return {"seconds": seconds, "tokens_per_second": rate, "mfu": mfu}


def memory() -> dict[str, int | None]:
    """Peak bytes: of the first device (None where the backend does not count) and of the host."""
    stats: dict[str, Any] = jax.local_devices()[0].memory_stats() or {}
    return {
        "device_peak_bytes": stats.get("peak_bytes_in_use"),
        "host_peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


class MetricsLog:
    """`metrics.jsonl`: rows in the order in which steps were taken.

    A number that is not finite is null, for JSON has no NaN; `accepted` says what became of it.
    Rows of an attempt that a rollback ended stay, so that a spike can be seen: the last row of a
    step is the one that counts.

    Args:
      folder: of the run.
      attempt: rollbacks so far.
      data_index: cursor that training goes on from; rows beyond it, which a killed process wrote,
        are cut off, for they are about to be written again.
    """

    def __init__(self, folder: Path, *, attempt: int, data_index: int):
        self.path = folder / "metrics.jsonl"
        if jax.process_index() or not self.path.exists():
            return
        kept = []
        for line in self.path.read_bytes().splitlines(keepends=True):
            try:
                row = json.loads(line)
            except ValueError:  # the last line of a killed process
                continue
            if row["attempt"] < attempt or row["data_index"] < data_index:
                kept.append(line)
        write_atomic(self.path, b"".join(kept))

    def append(self, row: dict[str, Any]) -> None:
        """Write a row; only the first process does."""
        if jax.process_index():
            return
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({k: _plain(v) for k, v in row.items()}, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class Console:
    """A line for people, at most every `seconds`.

    Args:
      total: steps of the run.
      seconds: between lines.
    """

    def __init__(self, total: int, *, seconds: float = 10.0):
        self.total, self.seconds = total, seconds
        self._shown = -math.inf
        self._began: tuple[float, int] | None = None

    def show(self, row: dict[str, Any], *, last: bool = False) -> None:
        """Print a row if it is time."""
        now = time.monotonic()
        if self._began is None:
            self._began = (now, row["step"])  # the first step compiles: not part of the rate
        if jax.process_index() or (now - self._shown < self.seconds and not last):
            return
        self._shown = now
        print(self.line(row, now), flush=True)

    def line(self, row: dict[str, Any], now: float) -> str:
        """The text of a row."""
        began, first = self._began or (now, row["step"])
        done, step = row["step"] - first, row["step"] + 1
        left = (now - began) / done * (self.total - step) if done > 0 else None
        mfu = "" if row["mfu"] is None else f"  MFU {100 * row['mfu']:.1f}%"
        loss = "not finite" if row["loss"] is None else f"{row['loss']:.4f}"
        refused = "" if row["accepted"] else "  refused"
        return (
            f"step {step:,}/{self.total:,}  loss {loss}{refused}  lr {row['lr']:.2e}  "
            f"{row['tokens_per_second']:,.0f} tokens/s{mfu}  left {clock(left)}"
        )


def clock(seconds: float | None) -> str:
    """Seconds as h:mm:ss, or -:-- when nobody knows.

    >>> clock(3725.2), clock(None)
    ('1:02:05', '-:--')
    """
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
