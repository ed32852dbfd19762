"""Checkpoints of others: Hugging Face folders in and out, GGUF files in.

    config, params, *_ = load("path/to/Llama-3.2-1B")       # a folder, or a .gguf file
    logits = models.apply(config, params, tokens)
    save_folder("out", config, params)

`python -m models.hf convert` and `python -m models.hf verify` do it from the command line.
"""

from models.hf.config import config_from_hf, config_to_hf
from models.hf.folder import Checkpoint, load_folder, save_folder

__all__ = ["Checkpoint", "config_from_hf", "config_to_hf", "load_folder", "save_folder"]
