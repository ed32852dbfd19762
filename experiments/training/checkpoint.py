"""Small files that are whole or absent, and a training state in one of them.

A sweep's models are small and live on one host: one `.npz`, written beside and renamed over, is
atomic, has no background thread, and restores bit for bit.
"""

import io
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a crash at any moment leaves the old content or the new, never a mix.

    Raises:
      OSError: no space or no permission; the old content is untouched and no litter is left.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    """Make the rename itself survive a power cut (a directory has its own blocks)."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """`value` as indented JSON, atomically. NaN and infinity are refused: JSON has neither.

    Raises:
      ValueError: a number is not finite.
    """
    write_atomic(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """The JSON value in a file.

    Raises:
      ValueError: the file is not JSON; the message names it.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is not valid JSON ({error}); delete it to start it over"
        ) from None


def save_state(path: Path, state: Any) -> None:
    """Write every leaf of a pytree to one `.npz`, keyed by its path in the tree."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {jax.tree_util.keystr(p): np.asarray(v) for p, v in leaves}
    np.savez(buffer, **arrays)
    write_atomic(path, buffer.getvalue())


def load_state(path: Path, like: Any) -> Any:
    """The pytree that `save_state` wrote, with the structure of `like`.

    Raises:
      ValueError: the leaves differ from those of `like` in name, shape or dtype.
    """
    with np.load(path) as archive:
        stored = dict(archive)
    wanted = jax.tree_util.tree_leaves_with_path(like)
    names = [jax.tree_util.keystr(p) for p, _ in wanted]
    if set(names) != set(stored):
        raise ValueError(
            f"{path} holds other leaves than this run's state: {sorted(set(names) ^ set(stored))}"
        )
    for name, (_, leaf) in zip(names, wanted, strict=True):
        if (stored[name].shape, stored[name].dtype) != (leaf.shape, leaf.dtype):
            raise ValueError(
                f"{path}: {name} is {stored[name].dtype}{list(stored[name].shape)}, this run has "
                f"{leaf.dtype}{list(leaf.shape)}"
            )
    leaves = [jax.numpy.asarray(stored[name]) for name in names]
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(like), leaves)
