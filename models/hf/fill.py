"""Building a parameter tree from named stored tensors, one tensor at a time."""

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from models.decoder import Params, init_params
from models.hf.dtypes import cast
from models.hf.names import Tensors, stored_shape

Read = Callable[[str], np.ndarray]


def check_names(found: Iterable[str], expected: Iterable[str], *, where: str) -> None:
    """That a checkpoint has every tensor of a model, and no other.

    Raises:
        ValueError: it has not; the message names tensors.
    """
    found, expected = set(found), set(expected)
    unmapped, missing = sorted(found - expected), sorted(expected - found)
    if unmapped:
        raise ValueError(
            f"{where} has {len(unmapped)} tensors that the model has no place for, among them "
            f"{unmapped[:3]}; the config does not describe this checkpoint."
        )
    if missing:
        hint = ""
        if missing == ["lm_head.weight"]:
            hint = " The config says tie_word_embeddings=false: if they are tied, say so there."
        raise ValueError(
            f"{where} lacks {len(missing)} tensors of the model, among them {missing[:3]}.{hint}"
        )


def fill_params(config: ModelConfig, named: Tensors, read: Read) -> Params:
    """The parameters of a model in `config.param_dtype`, each tensor read, cast and let go.

    Args:
        config: the model.
        named: where each tensor goes; its names have been checked against the file.
        read: the stored tensor of a name, any floating dtype.

    Raises:
        ValueError: a tensor has another shape than the config says.
        RuntimeError: a parameter was filled twice or not at all: `named` does not fit the model.
    """
    abstract = _abstract(config)
    host = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), abstract)
    layers = jax.tree.map(lambda leaf: 0, abstract)
    for name, parts in named.items():
        stored = read(name)
        if stored.shape != stored_shape(parts):
            raise ValueError(
                f"{name} has shape {list(stored.shape)}, but the config says "
                f"{list(stored_shape(parts))}."
            )
        start = 0
        for part in parts:
            rows = stored[start : start + part.rows]
            start += part.rows
            leaf = get_leaf(host, part.path)
            target = leaf if part.layer is None else leaf[part.layer]
            target[...] = part.from_stored(cast(rows, leaf.dtype))
            counts = get_leaf(layers, part.path[:-1])
            counts[part.path[-1]] += 1
    for path, filled in jax.tree_util.tree_leaves_with_path(layers):
        keys = tuple(key.key for key in path)
        wanted = config.num_layers if keys[0] == "blocks" else 1
        if filled != wanted:
            raise RuntimeError(f"{'.'.join(keys)} was filled {filled} times, not {wanted}.")
    return _to_device(host)


@lru_cache(maxsize=8)
def _abstract(config: ModelConfig) -> Any:
    return jax.eval_shape(partial(init_params, config), jax.random.key(0))


def get_leaf(tree: Any, path: tuple[str, ...]) -> Any:
    """What lies at a path of a nested dict."""
    for key in path:
        tree = tree[key]
    return tree


def _to_device(host: Any) -> Params:
    """Moves leaf by leaf, letting go of each host array, so that little lies in memory twice."""
    return {
        key: _to_device(host.pop(key)) if isinstance(host[key], dict) else jnp.array(host.pop(key))
        for key in list(host)
    }
