"""Named shapes shared by tests, autotuning and benchmarks."""

from __future__ import annotations

import dataclasses

from pallas_flash.call import Sizes


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention problem by sizes and plain masks; what is not a size is a flag.

    Attributes:
      name: how tests and reports call it.
      B, T, S, N, K, H: the letters of the shape legend.
      Hv: head dim of values; H when 0.
      is_causal, window: as in `dot_product_attention`.
      q_lengths, kv_lengths: draw lengths for each batch row.
      bias: axes of (B, N, T, S) that the bias has in full, as letters; None is no bias.
      dense: the same for a boolean mask.
    """

    name: str
    B: int = 2
    T: int = 64
    S: int = 64
    N: int = 2
    K: int = 2
    H: int = 16
    Hv: int = 0
    is_causal: bool = False
    window: tuple[int | None, int | None] | None = None
    q_lengths: bool = False
    kv_lengths: bool = False
    bias: str | None = None
    dense: str | None = None

    def __post_init__(self) -> None:
        if self.K < 1 or self.N % self.K:
            raise ValueError(f"{self.name}: N={self.N} must be a multiple of K={self.K}")
        for field in ("bias", "dense"):
            letters = getattr(self, field)
            if letters is not None and not set(letters) <= set("BNTS"):
                raise ValueError(f"{self.name}: {field}={letters!r} must be letters of 'BNTS'")

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.B, self.T, self.S, self.N, self.K, self.H, self.Hv or self.H)

    def broadcast_shape(self, letters: str) -> tuple[int, int, int, int]:
        """(B|1, N|1, T|1, S|1) with the named axes in full."""
        B, N, T, S = (getattr(self, a) if a in letters else 1 for a in "BNTS")
        return B, N, T, S


# Small enough for a Pallas kernel in the interpreter, more than one tile of 64 in each direction.
SMALL = (
    Case("plain"),
    Case("causal", T=130, S=130, is_causal=True),
    Case("causal-wide", T=48, S=150, is_causal=True),
    Case("causal-tall", T=150, S=48, is_causal=True),
    Case("grouped", T=96, S=96, N=6, K=2, is_causal=True),
    Case("multi-query", T=65, S=80, N=4, K=1),
    Case("window", T=160, S=160, window=(20, 7)),
    Case("window-left", T=160, S=160, window=(24, None), is_causal=True),
    Case("odd-primes", B=1, T=67, S=131, N=3, K=3, H=24, is_causal=True),
    Case("one-query", T=1, S=97, N=4, K=2),
    Case("one-key", T=33, S=1),
    Case("kv-lengths", B=3, T=70, S=100, kv_lengths=True),
    Case("lengths-causal", B=3, T=100, S=100, is_causal=True, q_lengths=True, kv_lengths=True),
    Case("bias-full", T=72, S=90, bias="BNTS"),
    Case("bias-heads", T=72, S=72, N=4, K=2, bias="NTS", is_causal=True),
    Case("bias-keys", T=72, S=72, bias="NS"),
    Case("mask-full", T=72, S=90, dense="BNTS"),
    Case("mask-keys", T=72, S=90, dense="BS", bias="T"),
    Case("value-dim", T=70, S=70, H=24, Hv=16, is_causal=True),
)

# What models run; for GPUs and benchmarks. Tokens are constant at 16k, as in the papers.
LARGE = (
    *(
        Case(
            f"causal-{T}-{H}", B=16384 // T, T=T, S=T, N=2048 // H, K=2048 // H, H=H, is_causal=True
        )
        for H in (64, 128)
        for T in (1024, 4096, 16384)
    ),
    Case("full-4096-128", B=4, T=4096, S=4096, N=16, K=16, H=128),
    Case("grouped-4096-128", B=4, T=4096, S=4096, N=32, K=8, H=128, is_causal=True),
    Case(
        "window-16384-128",
        B=1,
        T=16384,
        S=16384,
        N=16,
        K=16,
        H=128,
        is_causal=True,
        window=(1023, 0),
    ),
)

# What published attention benchmarks time: 16k tokens, model width 2048.
PUBLISHED = (
    Case("d128_s2k", B=8, T=2048, S=2048, N=16, K=16, H=128),
    Case("d128_s2k_c", B=8, T=2048, S=2048, N=16, K=16, H=128, is_causal=True),
    Case("d128_s8k", B=2, T=8192, S=8192, N=16, K=16, H=128),
    Case("d128_s8k_c", B=2, T=8192, S=8192, N=16, K=16, H=128, is_causal=True),
    Case("d128_s16k_c", B=1, T=16384, S=16384, N=16, K=16, H=128, is_causal=True),
    Case("llama8b_s8k_c", B=2, T=8192, S=8192, N=32, K=8, H=128, is_causal=True),
    Case("d64_s4k_c", B=4, T=4096, S=4096, N=32, K=32, H=64, is_causal=True),
    Case("d64_s16k", B=1, T=16384, S=16384, N=32, K=32, H=64),
    Case("d256_s8k_c", B=2, T=8192, S=8192, N=8, K=8, H=256, is_causal=True),
)

BY_NAME = {case.name: case for case in SMALL + LARGE + PUBLISHED}
