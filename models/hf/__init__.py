"""Checkpoints of others: Hugging Face folders in and out, GGUF files in.

    config, params, *_ = load("path/to/Llama-3.2-1B")       # a folder, or a .gguf file
    logits = models.apply(config, params, tokens)
    save_folder("out", config, params)

`python -m models.hf convert` and `python -m models.hf verify` do it from the command line.
"""

from pathlib import Path
from typing import Any

from models.hf.config import config_from_hf, config_to_hf
from models.hf.folder import Checkpoint, load_folder, save_folder
from models.hf.gguf_file import load_gguf

__all__ = [
    "Checkpoint",
    "config_from_hf",
    "config_to_hf",
    "load",
    "load_folder",
    "load_gguf",
    "save_folder",
]


def load(path: str | Path, *, param_dtype: str | None = None, **overrides: Any) -> Checkpoint:
    """A model from a folder (see `load_folder`) or a file that ends in .gguf (`load_gguf`)."""
    read = load_gguf if Path(path).suffix == ".gguf" else load_folder
    return read(path, param_dtype=param_dtype, **overrides)
