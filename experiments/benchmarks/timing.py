"""Time of one call: GPU kernel time by CUPTI at sustained clocks, wall clock on a CPU.

A power-limited card runs a short burst well above what it sustains, so that a ratio between a cold
and a hot measurement means nothing. Every measurement here follows `HEAT_S` seconds of the same
call, and the SM clock is recorded beside it.
"""

from __future__ import annotations

import collections
import dataclasses
import subprocess
import time
from collections.abc import Callable
from typing import Any, Literal

import jax

HEAT_S = 0.7  # seconds of the same call before the clocks count as sustained
MEASURE_S = 0.3  # seconds of calls that are measured
FEWEST_CALLS = 20


@dataclasses.dataclass(frozen=True)
class Timing:
    """Time of one call.

    Attributes:
      ms: milliseconds per call.
      method: "cupti" sums the kernels of the call; "wall" is a chain of calls by the clock.
      calls: how many calls were measured.
      kernels: milliseconds per call by kernel name; empty for wall clock.
      sm_clock_mhz: SM clock right after the measurement, where nvidia-smi tells it.
    """

    ms: float
    method: Literal["cupti", "wall"]
    calls: int
    kernels: dict[str, float] = dataclasses.field(default_factory=dict)
    sm_clock_mhz: int | None = None


def time_call(
    call: Callable[[], Any], *, heat_s: float = HEAT_S, measure_s: float = MEASURE_S
) -> Timing:
    """Time `call`, which returns arrays: CUPTI on a GPU, else wall clock.

    Raises:
      RuntimeError: CUPTI saw no kernel, or lost some.
    """
    jax.block_until_ready(call())  # compile
    once = _seconds(call, 3)
    _seconds(call, max(3, int(heat_s / once)))
    if jax.default_backend() != "gpu":
        calls = max(1, int(measure_s / once))
        return Timing(_seconds(call, calls) * 1e3, "wall", calls)
    calls = max(FEWEST_CALLS, int(measure_s / once))
    kernels = _cupti(call, calls)
    return Timing(sum(kernels.values()), "cupti", calls, kernels, sm_clock_mhz())


def _seconds(call: Callable[[], Any], calls: int) -> float:
    """Wall-clock seconds per call of a chain of calls."""
    start = time.perf_counter()
    results = None
    for _ in range(calls):
        results = call()
    jax.block_until_ready(results)
    return (time.perf_counter() - start) / calls


def _cupti(call: Callable[[], Any], calls: int) -> dict[str, float]:
    """Milliseconds per call of every kernel that `call` launches."""
    # JAX ships CUPTI's records only inside its Mosaic GPU extension, without a public name.
    from jax._src.lib import mosaic_gpu

    extension: Any = mosaic_gpu._mosaic_gpu_ext  # pyright: ignore[reportAttributeAccessIssue]
    extension._cupti_init()
    try:
        _seconds(call, calls)
    finally:
        records = extension._cupti_get_timings(False)
    by_kernel: dict[str, list[float]] = collections.defaultdict(list)
    for name, ms in records:
        by_kernel[name].append(ms)
    if not by_kernel:
        raise RuntimeError("CUPTI saw no kernel: is another profiler attached?")
    for name, times in by_kernel.items():
        if len(times) % calls:
            raise RuntimeError(
                f"CUPTI saw {len(times)} launches of {name[:60]} in {calls} calls: records were "
                "lost, measure fewer calls"
            )
    return {name: sum(times) / calls for name, times in by_kernel.items()}


def sm_clock_mhz() -> int | None:
    """The first GPU's SM clock, or None where nvidia-smi does not tell."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
        return int(answer.stdout.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
