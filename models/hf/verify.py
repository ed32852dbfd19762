"""Do our logits equal a reference's? From a file, or from transformers itself."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from safetensors.numpy import load_file, save_file

from models.config import ModelConfig
from models.decoder import apply
from models.hf.folder import Checkpoint


@dataclass(frozen=True)
class Agreement:
    """How far logits are from the reference.

    Args:
        tokens: positions compared.
        max_difference: of any logit. NaN on either side makes it NaN.
        scale: largest logit of the reference, in size.
        worst_position: where that was, as an index into the sequence.
        max_kl: largest KL divergence, over positions, from reference to ours, in nats.
        same_top: share of positions whose best token is the same.
    """

    tokens: int
    max_difference: float
    scale: float
    worst_position: int
    max_kl: float
    same_top: float

    def within(self, tolerance: float) -> bool:
        """Whether every logit is, in units of the scale (of 1 where that is less); NaN never is.

        Real models have logits of tens, whose float32 rounding grows with them.
        """
        return self.max_difference <= tolerance * max(1.0, self.scale)


def compare(got: Float[np.ndarray, "B T V"], reference: Float[np.ndarray, "B T V"]) -> Agreement:
    """Agreement of two sets of logits, in float64.

    Raises:
        ValueError: their shapes differ.
    """
    if got.shape != reference.shape:
        raise ValueError(
            f"our logits have shape {list(got.shape)}, the reference {list(reference.shape)}."
        )
    ours, theirs = np.asarray(got, np.float64), np.asarray(reference, np.float64)
    difference = np.abs(ours - theirs).max(-1)
    p, q = _log_softmax(theirs), _log_softmax(ours)
    return Agreement(
        tokens=difference.size,
        max_difference=float(difference.max()),
        scale=float(np.abs(theirs).max()),
        worst_position=int(np.unravel_index(difference.argmax(), difference.shape)[-1]),
        max_kl=float((np.exp(p) * (p - q)).sum(-1).max()),
        same_top=float((ours.argmax(-1) == theirs.argmax(-1)).mean()),
    )


def our_logits(checkpoint: Checkpoint, tokens: Int[np.ndarray, "B T"]) -> np.ndarray:
    """Logits [B, T, V] of a checkpoint, matrix products in full precision."""
    with jax.default_matmul_precision("highest"):
        run = _compiled(checkpoint.config)
        return np.asarray(run(checkpoint.params, jnp.asarray(tokens, jnp.int32)))


@lru_cache(maxsize=8)
def _compiled(config: ModelConfig) -> Callable[..., Any]:
    return jax.jit(partial(apply, config))


def read_reference(path: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [B, T] and logits [B, T, V] of a safetensors file with these two names.

    Raises:
        ValueError: a name is missing, or the shapes do not fit.
    """
    held = load_file(path)
    if not {"tokens", "logits"} <= held.keys():
        raise ValueError(f"{path} must hold tokens and logits, got {sorted(held)}.")
    tokens, logits = held["tokens"], held["logits"]
    if tokens.ndim != 2 or logits.shape[:-1] != tokens.shape:
        raise ValueError(
            f"{path} must hold tokens [B, T] and logits [B, T, V], got shapes "
            f"{list(tokens.shape)} and {list(logits.shape)}."
        )
    return tokens, logits


def write_reference(path: str | Path, tokens: np.ndarray, logits: np.ndarray) -> None:
    """The file that `read_reference` reads."""
    save_file({"tokens": tokens.astype(np.int32), "logits": logits.astype(np.float32)}, path)


def transformers_logits(path: str | Path, tokens: Int[np.ndarray, "B T"]) -> np.ndarray:
    """Float32 logits of transformers' own model of a folder or GGUF file, on the CPU.

    Raises:
        ImportError: torch or transformers is not installed.
    """
    try:
        import torch  # pyright: ignore[reportMissingImports]
        import transformers  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            "comparing with transformers needs torch and transformers (the extra 'hf', in a venv "
            "of its own); or give --reference, a file of logits."
        ) from error
    path = Path(path)
    where: dict[str, Any] = {"pretrained_model_name_or_path": path}
    if path.suffix == ".gguf":
        where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model.eval()(torch.from_numpy(np.asarray(tokens, np.int64))).logits.numpy()


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))
