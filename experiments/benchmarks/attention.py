"""Check and time attention, forward and backward, beside its peers: one JSON row per measurement.

    python -m experiments.benchmarks.attention --peers triton cudnn --cases d128_s8k_c
    python -m experiments.benchmarks.attention --list

Every peer is first compared, output and gradients, with the float32 reference on the case itself
(on its first batch row and first key/value head, so that the reference fits in memory); a row of a
peer that is wrong says so and holds no time. Rows are appended to
`experiments/benchmarks/results/NAME.jsonl`.

FLOPs are counted as the papers count them: 2 (H + Hv) for each visible (query, key) pair of each
head forward, T S / 2 pairs when causal, and 2.5 times that backward.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import tyro
from jaxtyping import Array

import pallas_flash
from experiments.benchmarks import peers, timing
from experiments.console import run_main
from pallas_flash import shapes
from pallas_flash.mask import Mask
from pallas_flash.shapes import Case

RESULTS = Path(__file__).parent / "results"
Direction = Literal["fwd", "bwd"]
DTYPES = Literal["bfloat16", "float16", "float32"]

CASES = shapes.BY_NAME
# Largest error of an output or gradient, over its largest value in float32.
TOLERANCE = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 2e-5}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time."""

    cases: tuple[str, ...] = ()
    """Names of cases; none for the published ones on a GPU and three small ones elsewhere."""
    peers: tuple[str, ...] = ()
    """Names of implementations; none for ours, and cudnn on a GPU."""
    dirs: tuple[Direction, ...] = ("fwd", "bwd")
    """Directions to time."""
    dtype: DTYPES = "bfloat16"
    """Of query, key and value."""
    name: str = "attention"
    """Rows go to results/NAME.jsonl."""
    folder: Path = RESULTS
    """Folder of the results."""
    heat: float = timing.HEAT_S
    """Seconds of calls before each measurement."""
    measure: float = timing.MEASURE_S
    """Seconds of calls per measurement."""
    check: bool = True
    """Compare with the reference first."""
    list: Annotated[bool, tyro.conf.arg(help="Print the cases and leave.")] = False

    def __post_init__(self) -> None:
        unknown = [name for name in self.cases if name not in CASES]
        if unknown:
            raise ValueError(f"cases: no case {', '.join(unknown)}; --list names all of them")
        for peer in self.peers:
            peers.check_name(peer)
        if self.heat < 0 or self.measure <= 0:
            raise ValueError(
                f"heat must be >= 0 and measure > 0 seconds, got {self.heat} and {self.measure}"
            )

    def chosen_cases(self) -> tuple[Case, ...]:
        default = (
            tuple(case.name for case in shapes.PUBLISHED)
            if on_gpu()
            else ("causal", "grouped", "window")
        )
        return tuple(CASES[name] for name in self.cases or default)

    def chosen_peers(self) -> tuple[str, ...]:
        return self.peers or (("triton", "xla", "cudnn") if on_gpu() else ("reference", "xla"))


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


# ---- one case ---------------------------------------------------------------------------------


def draw(case: Case, dtype: str) -> tuple[Array, Array, Array, Array]:
    """Normal query, key, value and output cotangent of a case."""
    sizes = case.sizes
    keys = jax.random.split(jax.random.key(0), 4)

    def normal(key: Array, *shape: int) -> Array:
        return jax.random.normal(key, shape, jnp.dtype(dtype))

    return (
        normal(keys[0], sizes.B, sizes.T, sizes.N, sizes.H),
        normal(keys[1], sizes.B, sizes.S, sizes.K, sizes.H),
        normal(keys[2], sizes.B, sizes.S, sizes.K, sizes.Hv),
        normal(keys[3], sizes.B, sizes.T, sizes.N, sizes.Hv),
    )


def flops(case: Case, direction: Direction) -> float:
    """Floating-point operations of one call.

    >>> flops(Case("one", B=1, T=4, S=4, N=1, K=1, H=8), "fwd")  # 2 products of 2 * 4 * 4 * 8
    512.0
    """
    sizes = case.sizes
    pairs = sizes.T * sizes.S / (2 if case.is_causal else 1)
    if case.window is not None:
        pairs = _visible_pairs(case)
    forward = 2.0 * (sizes.H + sizes.Hv) * sizes.B * sizes.N * pairs
    return forward * (2.5 if direction == "bwd" else 1)


def _visible_pairs(case: Case) -> int:
    """(query, key) pairs of one head that the mask leaves, row by row."""
    mask = Mask(is_causal=case.is_causal, window=case.window or (None, None))
    rows = np.arange(case.T)
    first = 0 if mask.left is None else np.maximum(rows - mask.left, 0)
    last = case.S if mask.right is None else np.minimum(rows + mask.right + 1, case.S)
    return int(np.maximum(last - first, 0).sum())


def largest_error(peer: peers.Attention, case: Case, arrays: tuple[Array, ...]) -> float:
    """Largest error of output and gradients on batch row 0 and key/value head 0.

    Relative to the largest value of each array in the float32 reference.
    """
    exact = peers.attention("reference", case)
    group = case.sizes.G
    heads = (group, 1, 1, group)
    part = [x[:1, :, :count].astype(jnp.float32) for x, count in zip(arrays, heads, strict=True)]

    def outcome(attend: peers.Attention, query, key, value, dout) -> tuple[Array, ...]:
        out, backward = jax.vjp(attend, query, key, value)
        return (out, *backward(dout))

    got = jax.jit(lambda *arrays: outcome(peer, *arrays))(*arrays)
    want = jax.jit(lambda *arrays: outcome(exact, *arrays))(*part)
    worst = 0.0
    for actual, expected, count in zip(got, want, (group, group, 1, 1), strict=True):
        difference = jnp.abs(actual[:1, :, :count].astype(jnp.float32) - expected)
        error = float(jnp.max(difference) / jnp.max(jnp.abs(expected)))
        worst = max(worst, error) if error == error else float("nan")
        if worst != worst:
            break
    return worst


def calls(
    attend: peers.Attention, arrays: tuple[Array, ...]
) -> dict[Direction, Callable[[], Callable[[], Any]]]:
    """Compiled calls to time, made when asked for: forward alone, and backward alone."""
    query, key, value, dout = arrays

    def forward() -> Callable[[], Any]:
        run = jax.jit(attend)
        return lambda: run(query, key, value)

    def backward() -> Callable[[], Any]:
        _, pull = jax.jit(lambda *qkv: jax.vjp(attend, *qkv))(query, key, value)
        run = jax.jit(lambda pull, dout: pull(dout))
        return lambda: run(pull, dout)

    return {"fwd": forward, "bwd": backward}


def measure(options: Options, case: Case, peer: str) -> Iterator[dict[str, Any]]:
    """Rows of one peer on one case; a failure is a row with its error."""
    row: dict[str, Any] = {"case": case.name, "peer": peer, "dtype": options.dtype}
    try:
        attend = peers.attention(peer, case)
        arrays = draw(case, options.dtype)
        if options.check:
            row["max_error"] = largest_error(attend, case, arrays)
            if not row["max_error"] <= TOLERANCE[options.dtype]:
                yield {**row, "dir": "both", "error": "wrong: max_error is beyond the tolerance"}
                return
        for direction in options.dirs:
            call = calls(attend, arrays)[direction]()
            took = timing.time_call(call, heat_s=options.heat, measure_s=options.measure)
            tflops = flops(case, direction) / took.ms / 1e9
            yield {**row, "dir": direction, "tflops": tflops, **dataclasses.asdict(took)}
    except Exception as error:  # one peer's failure must not end the run: it becomes a row
        yield {**row, "dir": "both", "error": f"{type(error).__name__}: {str(error)[:300]}"}


# ---- the run ------------------------------------------------------------------------------------


def provenance(module: str = "experiments.benchmarks.attention") -> dict[str, Any]:
    """Where the rows of this run of a command come from."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "versions": {
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "pallas_flash": getattr(pallas_flash, "__version__", "checkout"),
        },
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def run(options: Options) -> Path:
    """Time everything, print a line and append a row for each measurement; the rows' path."""
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / f"{options.name}.jsonl"
    source = provenance()
    with path.open("a") as rows:
        for case in options.chosen_cases():
            for peer in options.chosen_peers():
                for row in measure(options, case, peer):
                    rows.write(json.dumps({**row, **source}) + "\n")
                    rows.flush()
                    print(describe(row), flush=True)
                jax.clear_caches()
    return path


def describe(row: dict[str, Any]) -> str:
    """One line of a row for the terminal."""
    start = f"{row['case']:18} {row['peer']:44} {row['dir']:4}"
    if "error" in row:
        return f"{start} {row['error']}"
    return f"{start} {row['ms']:9.3f} ms {row['tflops']:7.1f} TFLOP/s ({row['method']})"


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    if options.list:
        for case in CASES.values():
            print(case)
        return
    print(f"rows appended to {run(options)}")


if __name__ == "__main__":
    sys.exit(run_main(main))
