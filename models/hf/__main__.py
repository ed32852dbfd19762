"""Checkpoints from the command line.

python -m models.hf convert SmolLM2.gguf out --dtype bfloat16
python -m models.hf verify out --reference logits.safetensors
python -m models.hf verify out                     # against transformers, where installed
"""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro

from models.hf import load, save_folder
from models.hf.verify import (
    compare,
    our_logits,
    read_reference,
    transformers_logits,
    write_reference,
)

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Read a checkpoint, check every tensor of it, and write it as a Hugging Face folder."""

    source: tyro.conf.Positional[Path]
    """A Hugging Face folder or a .gguf file."""
    target: tyro.conf.Positional[Path]
    """The folder to write."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """On disk, rounded once; without it what the source holds (float32 from a GGUF)."""
    family: Literal["llama", "qwen2", "qwen3", "mistral", "phi3"] | None = None
    """model_type to write; without it that of the source."""
    max_shard_bytes: int = 5_000_000_000
    """A new file begins before one would pass this size."""
    overwrite: bool = False
    """Replace a model that the target already holds."""

    def run(self) -> int:
        if self.source.resolve() == self.target.resolve():
            raise ValueError(f"target {self.target} is the source; give another folder.")
        wanted = None if self.dtype == "float16" else self.dtype
        config, params, family, raw = load(self.source, param_dtype=wanted)
        ids = {key: raw[key] for key in _TOKEN_IDS if raw.get(key) is not None}
        save_folder(
            self.target,
            config,
            params,
            family=self.family or family,
            dtype=self.dtype,
            max_shard_bytes=self.max_shard_bytes,
            extra_config=ids,
            overwrite=self.overwrite,
        )
        for file in sorted(self.source.glob("*token*")) if self.source.is_dir() else ():
            shutil.copy(file, self.target)
        dtype = self.dtype or config.param_dtype
        print(f"{self.target}: {config.param_count():,} parameters in {dtype}")
        return 0


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Compare our float32 logits with a reference at every position; exit 1 beyond tolerance."""

    source: tyro.conf.Positional[Path]
    """A Hugging Face folder or a .gguf file."""
    reference: Path | None = None
    """safetensors with tokens [B, T] and logits [B, T, V]; without it transformers is asked."""
    tolerance: float = 1e-4
    """Largest difference of a logit that passes, as a share of the largest logit (or of 1)."""
    length: int = 128
    """Random tokens to compare on, where transformers computes the reference."""
    seed: int = 0
    """Of those tokens."""
    save: Path | None = None
    """Where to keep what transformers computed, to be a --reference elsewhere."""

    def run(self) -> int:
        checkpoint = load(self.source, compute_dtype="float32")
        if self.reference is not None:
            tokens, logits = read_reference(self.reference)
        else:
            rng = np.random.default_rng(self.seed)
            tokens = rng.integers(0, checkpoint.config.vocab_size, (1, self.length))
            logits = transformers_logits(self.source, tokens)
            if self.save is not None:
                write_reference(self.save, tokens, logits)
        agreement = compare(our_logits(checkpoint, tokens), logits)
        passed = agreement.within(self.tolerance)
        print(
            f"{'ok' if passed else 'FAILED'}: {agreement.tokens} positions, largest difference "
            f"{agreement.max_difference:.3g} of logits up to {agreement.scale:.3g} (at position "
            f"{agreement.worst_position}; tolerance {self.tolerance:g}), largest KL "
            f"{agreement.max_kl:.3g} nats, same best token at {agreement.same_top:.1%}"
        )
        return 0 if passed else 1


def main(args: list[str] | None = None) -> int:
    command = tyro.cli(
        Annotated[Convert, tyro.conf.subcommand("convert")]
        | Annotated[Verify, tyro.conf.subcommand("verify")],
        args=args,
        description=__doc__,
    )
    try:
        return command.run()
    except (OSError, ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
