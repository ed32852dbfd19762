"""Reading and writing a Hugging Face folder: config.json and safetensors, whole or in shards."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from models.config import PARAM_DTYPES, ModelConfig
from models.decoder import Params
from models.hf.config import config_from_hf, config_to_hf
from models.hf.dtypes import FLOAT_DTYPES, cast
from models.hf.fill import check_names, fill_params, get_leaf
from models.hf.names import EMBEDDING, HEAD, Tensors, stored_shape, tensors

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_STORED_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
# Every value of these is one of bfloat16 too.
_WITHIN_BFLOAT16 = {"bfloat16", "float8_e4m3fn", "float8_e5m2"}


class Checkpoint(NamedTuple):
    """A model read from disk: `models.apply(config, params, tokens)` runs it."""

    config: ModelConfig
    params: Params
    family: str
    raw: dict[str, Any]  # config.json, or what stands for it in the source


@dataclass(frozen=True)
class _Shards:
    """Names of the tensors of a folder and the file each lies in."""

    files: Mapping[str, Path]
    _open: dict[Path, Any] = field(default_factory=dict)

    def handle(self, name: str) -> Any:
        path = self.files[name]
        if path not in self._open:
            self._open.clear()  # names come in the order of files, so one open file will do
            self._open[path] = _opened(path)
        return self._open[path]

    def read(self, name: str) -> np.ndarray:
        dtype = self.dtype(name)
        if dtype.startswith("float8"):  # which the library gives to torch, but not to numpy
            return _read_bytes(self.files[name], name).view(dtype)
        return self.handle(name).get_tensor(name)

    def dtype(self, name: str) -> str:
        stored = self.handle(name).get_slice(name).get_dtype()
        if stored not in _STORED_DTYPES:
            raise ValueError(
                f"{name} is stored as {stored}; only {list(_STORED_DTYPES)} can be read. "
                "Quantised weights need their scales: export the model in bfloat16 first."
            )
        return _STORED_DTYPES[stored]


def load_folder(
    folder: str | Path, *, param_dtype: str | None = None, **overrides: Any
) -> Checkpoint:
    """A model from a Hugging Face folder, streamed tensor by tensor.

    Args:
        folder: holds config.json and model.safetensors, or shards and their index.
        param_dtype: "float32" or "bfloat16"; each weight is rounded once from what is stored. None
            keeps every value: bfloat16 if all tensors are (or float8), else float32 (float64 needs
            a word).
        overrides: other fields of `ModelConfig`, say `compute_dtype="float32"` or `max_seq_len`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: config or tensors hold what the model cannot do, or do not fit each other.
    """
    folder = Path(folder)
    raw = _read_json(folder / CONFIG)
    family, config = config_from_hf(raw, **overrides)
    shards = _Shards(_files(folder))
    named = tensors(config, family)
    names = [name for name in shards.files if not name.endswith("rotary_emb.inv_freq")]
    if config.tie_embeddings and HEAD in names:
        names.remove(HEAD)
        _check_tie(shards)
    check_names(names, named, where=str(folder))
    in_file_order: Tensors = {name: named[name] for name in sorted(names, key=_by_file(shards))}
    dtype = param_dtype or _kept_dtype({shards.dtype(name) for name in in_file_order})
    if dtype not in PARAM_DTYPES:
        raise ValueError(f"param_dtype must be one of {PARAM_DTYPES}, got {dtype!r}.")
    config = replace(config, param_dtype=dtype)
    return Checkpoint(config, fill_params(config, in_file_order, shards.read), family, raw)


def save_folder(
    folder: str | Path,
    config: ModelConfig,
    params: Params,
    *,
    family: str | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
    extra_config: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a model as a Hugging Face folder that transformers 4 and 5 load.

    config.json comes last, so that a folder with one is complete.

    Args:
        folder: made if missing.
        config, params: the model.
        family: `model_type` to write; None is the plainest that can say the model.
        dtype: "float32", "bfloat16" or "float16" on disk, one rounding from `params`; None keeps.
        max_shard_bytes: a new file begins before one would pass this size.
        extra_config: more keys of config.json, say `eos_token_id`; not those of the architecture.
        overwrite: replace the model that the folder already holds.

    Raises:
        FileExistsError: the folder holds a model and `overwrite` is not set.
        ValueError: the family cannot say the model, params do not fit config, or an extra key is
            one of the architecture.
    """
    folder = Path(folder)
    raw = config_to_hf(config, family=family, dtype=dtype)
    clash = [key for key in extra_config or {} if raw.get(key) is not None]
    if clash:
        raise ValueError(f"extra_config has {clash[0]!r}, which the architecture decides.")
    named = tensors(config, raw["model_type"])
    _check_params(config, params, named)
    disk = FLOAT_DTYPES[_one_of_float_dtypes(dtype or config.param_dtype)]
    if (folder / CONFIG).exists() and not overwrite:
        raise FileExistsError(f"{folder} already holds a model; give overwrite=True to replace it.")
    folder.mkdir(parents=True, exist_ok=True)
    for old in (folder / CONFIG, folder / INDEX, *folder.glob("model*.safetensors")):
        old.unlink(missing_ok=True)
    _write_shards(folder, params, named, disk, max_shard_bytes)
    _write_json(folder / CONFIG, raw | dict(extra_config or {}))


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}.") from error


def _read_bytes(path: Path, name: str) -> np.ndarray:
    """A tensor of one-byte items as uint8, by the format's own header (length, JSON, data)."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(size))[name]
        begin, end = entry["data_offsets"]
        file.seek(8 + size + begin)
        return np.frombuffer(file.read(end - begin), np.uint8).reshape(entry["shape"])


def _files(folder: Path) -> dict[str, Path]:
    index = folder / INDEX
    if not index.exists():
        path = folder / WEIGHTS
        if not path.exists():
            raise FileNotFoundError(
                f"{folder} has neither {WEIGHTS} nor {INDEX}; a .bin or .pth checkpoint must be "
                "saved as safetensors first."
            )
        return dict.fromkeys(_opened(path).keys(), path)
    weight_map = _read_json(index).get("weight_map", {})
    files = {name: folder / file for name, file in weight_map.items()}
    for path in sorted(set(files.values())):
        if path.parent != folder or not path.exists():
            raise FileNotFoundError(f"{index} names the shard {path.name}, which is not there.")
        held = set(_opened(path).keys())
        mapped = {name for name, file in files.items() if file == path}
        if held != mapped:
            raise ValueError(
                f"{INDEX} and {path.name} disagree about {sorted(held ^ mapped)[:3]}; the shards "
                "are not of one checkpoint."
            )
    return files


def _by_file(shards: _Shards):
    return lambda name: (shards.files[name].name, name)


def _check_tie(shards: _Shards) -> None:
    head, embedding = shards.read(HEAD), shards.read(EMBEDDING)
    if head.shape != embedding.shape or not np.array_equal(head, embedding, equal_nan=True):
        raise ValueError(
            f"tie_word_embeddings is true, but {HEAD} and {EMBEDDING} differ; set it to false to "
            "use both."
        )


def _kept_dtype(stored: set[str]) -> str:
    if "float64" in stored:
        raise ValueError(
            "the checkpoint holds float64 tensors; say param_dtype='float32' or 'bfloat16' to "
            "round them."
        )
    return "bfloat16" if stored <= _WITHIN_BFLOAT16 else "float32"


def _one_of_float_dtypes(dtype: str) -> str:
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"dtype must be one of {list(FLOAT_DTYPES)}, got {dtype!r}.")
    return dtype


def _check_params(config: ModelConfig, params: Params, named: Tensors) -> None:
    """That `params` are exactly the parameters which the stored tensors are made of."""
    parts = {part.path: part for group in named.values() for part in group}
    wanted = {
        path: part.shape if part.layer is None else (config.num_layers, *part.shape)
        for path, part in parts.items()
    }
    leaves = jax.tree_util.tree_leaves_with_path(params)
    got = {tuple(key.key for key in path): leaf.shape for path, leaf in leaves}
    for path in sorted(got.keys() | wanted.keys()):
        if got.get(path) != wanted.get(path):
            raise ValueError(
                f"params['{'.'.join(path)}'] has shape {got.get(path)}, but the config says "
                f"{wanted.get(path)} (None: no such parameter)."
            )


def _write_shards(
    folder: Path, params: Params, named: Tensors, dtype: np.dtype, max_shard_bytes: int
) -> None:
    sizes = {n: int(np.prod(stored_shape(p))) * dtype.itemsize for n, p in named.items()}
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    weight_map = {}
    for i, names in enumerate(shards):
        file = WEIGHTS if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        weight_map |= dict.fromkeys(names, file)
        held = {name: _stored(params, named, name, dtype) for name in names}
        save_file(held, folder / file, metadata={"format": "pt"})  # transformers asks for it
    if len(shards) > 1:
        total = {"total_size": sum(sizes.values())}
        _write_json(folder / INDEX, {"metadata": total, "weight_map": weight_map})


def _stored(params: Params, named: Tensors, name: str, dtype: np.dtype) -> np.ndarray:
    rows = []
    for part in named[name]:
        leaf = get_leaf(params, part.path)
        layer = np.asarray(leaf if part.layer is None else leaf[part.layer])
        rows.append(part.to_stored(cast(layer, dtype)))
    return np.ascontiguousarray(np.concatenate(rows))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; give the folder of a Hugging Face model.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}.")
    return value


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
