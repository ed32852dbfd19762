"""The decoder's configuration: every architectural choice as data, checked when it is made.

Dimension letters, here and in every signature of `models`: `B` batch, `T` sequence length,
`N` query heads, `K` key/value heads, `H` head dim, `D` model dim, `F` hidden dim of the MLP,
`V` vocabulary, `L` layers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from models.rope_scaling import RopeScaling
from pallas_flash.implementations import NAMES

Remat = Literal["none", "full", "attention"]

COMPUTE_DTYPES = ("float32", "bfloat16", "float16")
PARAM_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape, numerics and execution policy of one `models.Decoder`.

    The object is hashable and holds plain Python values only, so it can key a compilation cache
    and be written to JSON with `dataclasses.asdict`; what JSON makes of it (lists, a dict for
    `rope_scaling`) is accepted back.

    Args:
        vocab_size: V, rows of the token embedding.
        num_layers: L, transformer blocks.
        d_model: D, width of the residual stream.
        num_heads: N, query heads.
        num_kv_heads: K, key/value heads; divides N. K = N is multi-head attention, K = 1
            multi-query attention.
        head_dim: H, even (RoPE rotates pairs). Need not be D / N.
        ffn_dim: F, width between the gate/up and the down projection of the SwiGLU MLP.
        max_seq_len: longest sequence that a call accepts, in tokens.
        rope_theta: base of the RoPE frequencies, `theta ** (-2 i / R)`.
        rope_scaling: extension of the context, see `models.rope_scaling`; None for none.
        rotary_dim: R, the first dims of each head that RoPE turns, even; None is all H.
        sliding_window: keys that a query sees, itself and those just before it; None is all of
            them. A tuple gives each layer its own. Equal neighbours share one compiled block.
        tie_embeddings: the head is the transposed token embedding.
        qkv_bias: query, key and value projections add a bias.
        qk_norm: RMSNorm over the head dim of queries and keys, before RoPE.
        norm_eps: added to the mean square inside every RMSNorm.
        z_loss: coefficient of `logsumexp(logits) ** 2` in the training loss. The decoder does not
            read it; it travels with the model so that a run's loss can be read off its config.
        loss_chunk: tokens whose logit gradients the training loss holds at once, see
            `models.chunked_loss`; 0 for all tokens at once, None to choose by their number. Read
            by `decoder_loss` alone.
        compute_dtype: dtype of activations and of the operands of every matrix product.
        param_dtype: dtype in which parameters (and so gradients) are stored.
        attention_implementation: passed to `pallas_flash.dot_product_attention` as it is; None
            lets it choose the fastest for the device.
        remat: what the backward pass recomputes. "none": nothing. "full": each block, from its
            input. "attention": each block, but the attention output and its LSE are saved, so
            that the backward pass runs no attention forward kernel.
        scan_layers: one compiled block applied L times by `lax.scan`; False unrolls the loop
            (longer to compile; parameters are stacked over L either way).

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field is out of range or disagrees with another; the message names the field
            and the fix.
    """

    vocab_size: int
    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    max_seq_len: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rotary_dim: int | None = None
    sliding_window: int | tuple[int | None, ...] | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    norm_eps: float = 1e-5
    z_loss: float = 0.0
    loss_chunk: int | None = None
    compute_dtype: str = "bfloat16"
    param_dtype: str = "float32"
    attention_implementation: str | None = None
    remat: Remat = "none"
    scan_layers: bool = True

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "num_layers",
            "d_model",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "ffn_dim",
            "max_seq_len",
        ):
            _require_positive_int(name, getattr(self, name))
        for name in ("tie_embeddings", "qkv_bias", "qk_norm", "scan_layers"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        _require_number("rope_theta", self.rope_theta, above=1.0)
        _require_number("norm_eps", self.norm_eps, above=0.0)
        _require_number("z_loss", self.z_loss, at_least=0.0)
        if self.loss_chunk != 0 and self.loss_chunk is not None:
            _require_positive_int("loss_chunk", self.loss_chunk)
        _require_choice("compute_dtype", self.compute_dtype, COMPUTE_DTYPES)
        _require_choice("param_dtype", self.param_dtype, PARAM_DTYPES)
        _require_choice("remat", self.remat, get_args(Remat))
        if self.attention_implementation is not None:
            name = "attention_implementation"
            _require_choice(name, self.attention_implementation, NAMES)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}: "
                "each key/value head serves a whole group of query heads; choose a divisor."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} is odd, but RoPE rotates pairs of dimensions; "
                f"use {self.head_dim + 1}."
            )
        self._check_rope()
        self._check_windows()

    def _check_rope(self) -> None:
        if self.rotary_dim is not None:
            _require_positive_int("rotary_dim", self.rotary_dim)
            if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
                raise ValueError(
                    f"rotary_dim={self.rotary_dim} must be even and at most head_dim="
                    f"{self.head_dim}; None turns the whole head."
                )
        if isinstance(self.rope_scaling, Mapping):
            # The field of a frozen dataclass; JSON knows no dataclasses.
            object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
        scaling: Any = self.rope_scaling
        if scaling is not None:
            if not isinstance(scaling, RopeScaling):
                raise TypeError(f"rope_scaling must be a RopeScaling or None, got {scaling!r}.")
            scaling.check_dims(self.rotated_dims)

    def _check_windows(self) -> None:
        if isinstance(self.sliding_window, list | tuple):
            windows = tuple(self.sliding_window)
            object.__setattr__(self, "sliding_window", windows)
            if len(windows) != self.num_layers:
                raise ValueError(
                    f"sliding_window has {len(windows)} entries for num_layers={self.num_layers}; "
                    "give one for each layer, or one number for all."
                )
        for window in self.windows:
            if window is not None:
                _require_positive_int("sliding_window", window)

    @property
    def rotated_dims(self) -> int:
        """R: `rotary_dim`, or H where it is None."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer, None where a layer sees everything before it."""
        if isinstance(self.sliding_window, tuple):
            return self.sliding_window
        return (self.sliding_window,) * self.num_layers

    def param_groups(self) -> dict[str, int]:
        """Exact number of parameters by group; the groups are disjoint and sum to all of them.

        `embedding` is V·D; `head` is V·D, or 0 when tied; `attention` is L·(2·D·N·H + 2·D·K·H),
        its matrices; `bias` is L·(N + 2·K)·H, or 0; `mlp` is L·3·D·F; `norm` is (2·L + 1)·D, and
        2·L·H more with QK-norm.
        """
        qk_norm = 2 * self.head_dim if self.qk_norm else 0
        heads = self.num_heads + self.num_kv_heads
        biased_heads = self.num_heads + 2 * self.num_kv_heads if self.qkv_bias else 0
        return {
            "embedding": self.vocab_size * self.d_model,
            "attention": self.num_layers * 2 * self.d_model * heads * self.head_dim,
            "bias": self.num_layers * biased_heads * self.head_dim,
            "mlp": self.num_layers * 3 * self.d_model * self.ffn_dim,
            "norm": self.num_layers * (2 * self.d_model + qk_norm) + self.d_model,
            "head": 0 if self.tie_embeddings else self.vocab_size * self.d_model,
        }

    def param_count(self, embeddings: bool = True) -> int:
        """Exact number of parameters.

        With `embeddings=False`, without both vocabulary matrices: the token embedding and, when
        it is not tied to it, the head.
        """
        groups = self.param_groups()
        vocabulary = 0 if embeddings else groups["embedding"] + groups["head"]
        return sum(groups.values()) - vocabulary


def _require_positive_int(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}.")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}.")


def _require_number(
    name: str, value: object, *, above: float = -math.inf, at_least: float = -math.inf
) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}.")
    bound = f"above {above}" if above > -math.inf else f"at least {at_least}"
    if not (math.isfinite(value) and value > above and value >= at_least):
        raise ValueError(f"{name} must be finite and {bound}, got {value}.")


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        accepted = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be one of {accepted}, got {value!r}.")
