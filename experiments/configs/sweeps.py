"""Named sweeps. `python -m experiments.sweep --preset NAME` starts from one; any field can be set.

Centres (`expected_params`) and learning-rate factors were measured with these models on these
corpora; a sweep elsewhere should look at its first report and move them.
"""

import os
from collections.abc import Callable

from experiments.scaling.ladder import SweepConfig

CPU_LADDER = ("8x2", "12x2", "16x2", "24x2", "32x2", "48x2", "64x2", "80x2", "96x2")
GPU_LADDER = (
    *("64x2", "64x4", "96x3", "128x4", "160x4", "192x5"),
    *("256x5", "320x6", "384x6", "448x7", "512x8", "640x8"),
)


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def cpu() -> SweepConfig:
    """Minutes on two cores: byte-level models of 4 k to 240 k parameters on the sample corpus."""
    return SweepConfig(
        budgets=(6e10, 1.9e11, 6e11),
        ladder=CPU_LADDER,
        corpus="sample",
        expected_params=2.4e4,
        expected_budget=1.9e11,
        expected_exponent=0.64,
        lr_scale=0.2,
        lr_max=0.015,
        workers=cores(),
    )


def smoke() -> SweepConfig:
    """The whole path in under a minute on two cores; its exponents mean little."""
    return SweepConfig(
        budgets=(1e10, 2e10),
        ladder=("8x1", "16x1", "32x1"),
        sizes_per_budget=3,
        corpus="sample",
        out="runs/smoke",
        seq_len=64,
        expected_params=7e3,
        expected_budget=1.5e10,
        lr_scale=0.25,
        heldout_tokens=65_536,
        workers=cores(),
        bootstrap=200,
        max_minutes=3.0,
    )


def gpu() -> SweepConfig:
    """Ten minutes on one H200: 4k BPE, 0.4 M to 19 M parameters, on the built corpus."""
    return SweepConfig(
        budgets=(1e15, 10**15.5, 1e16),
        ladder=GPU_LADDER,
        sizes_per_budget=6,
        vocab_size=4096,
        seq_len=512,
        batch_size=64,
        head_dim=32,
        expected_params=3e6,
        expected_budget=10**15.5,
        lr_scale=0.5,
        heldout_tokens=2_000_000,
        compute_dtype="bfloat16",
        max_minutes=9.0,
    )


PRESETS: dict[str, Callable[[], SweepConfig]] = {"cpu": cpu, "gpu": gpu, "smoke": smoke}
