"""RoPE as Hugging Face configs write it: `rope_scaling` (transformers 4), `rope_parameters` (5).

Strict: a type, a key or a contradiction that is not understood is an error that names it, because
a wrong frequency shows as slightly worse text and nothing else.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from models.config import ModelConfig
from models.rope_scaling import RopeScaling, raised_theta

_ALWAYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_LENGTH = "original_max_position_embeddings"
_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", _LENGTH},
    "yarn": {
        *("factor", _LENGTH, "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    },
    "llama3": {"factor", _LENGTH, "low_freq_factor", "high_freq_factor"},
    "longrope": {"factor", _LENGTH, "attention_factor", "short_factor", "long_factor"},
}


class Rope(NamedTuple):
    """What a config says about RoPE."""

    theta: float
    rotary_dim: int | None
    scaling: RopeScaling | None


def rope_from_hf(raw: Mapping[str, Any], *, head_dim: int, max_positions: int) -> Rope:
    """RoPE of a `config.json`.

    Args:
        raw: the config, of transformers 4 or 5.
        head_dim: H.
        max_positions: its `max_position_embeddings`, or the default of its class.

    Raises:
        ValueError: an unknown type or key, a missing or contradictory one.
    """
    given = _rope_dict(raw)
    kind = _rope_type(given, family=raw.get("model_type"))
    unknown = sorted(set(given) - _ALWAYS - _KEYS[kind])
    if unknown:
        raise ValueError(
            f"rope_parameters has {unknown[0]!r}, which means nothing for rope type {kind!r}; "
            f"known are {sorted(_KEYS[kind] | _ALWAYS)}."
        )
    theta = float(_agreed(raw, given, "rope_theta", 10_000.0))
    partial = float(_agreed(raw, given, "partial_rotary_factor", 1.0))
    rotary_dim = _rotary_dim(head_dim, partial)
    if kind == "default":
        return Rope(theta, rotary_dim, None)
    length = max_positions
    if kind != "dynamic":  # which stretches from max_position_embeddings whatever else is said
        length = _agreed(raw, given, _LENGTH, 4096 if raw.get("model_type") == "phi3" else length)
    elif given.get(_LENGTH, max_positions) != max_positions:
        raise ValueError(
            f"{_LENGTH}={given[_LENGTH]} is not max_position_embeddings={max_positions}, which is "
            "what rope type 'dynamic' stretches from; make them equal."
        )
    return Rope(theta, rotary_dim, _scaling(kind, given, length, max_positions))


def _rope_dict(raw: Mapping[str, Any]) -> dict[str, Any]:
    both = [raw[key] for key in ("rope_parameters", "rope_scaling") if raw.get(key)]
    if len(both) == 2 and both[0] != both[1]:
        raise ValueError("the config has rope_parameters and rope_scaling that differ; keep one.")
    given = both[0] if both else {}
    if not isinstance(given, Mapping):
        raise ValueError(f"rope_parameters must be a dict, got {given!r}.")
    nested = [key for key, value in given.items() if isinstance(value, Mapping)]
    if nested:
        raise ValueError(
            f"rope_parameters gives each layer type its own RoPE ({nested}); only one RoPE for all "
            "layers can be read."
        )
    return {key: value for key, value in given.items() if value is not None}


def _rope_type(given: Mapping[str, Any], *, family: str | None) -> str:
    names = {given[key] for key in ("rope_type", "type") if key in given} or {"default"}
    if family == "phi3" and "short_factor" in given:
        names = {"longrope" if name in ("su", "yarn") else name for name in names}
    if len(names) > 1:
        raise ValueError(f"rope_type and type disagree: {sorted(names)}; keep one.")
    (kind,) = names
    if kind not in _KEYS:
        raise ValueError(f"unknown rope type {kind!r}; known are {sorted(_KEYS)}.")
    return kind


def _agreed(raw: Mapping[str, Any], given: Mapping[str, Any], key: str, default: Any) -> Any:
    """A value that may stand at the top or in the RoPE dict; not two different ones."""
    found = [place[key] for place in (given, raw) if place.get(key) is not None]
    if len(found) == 2 and found[0] != found[1]:
        raise ValueError(
            f"{key} is {found[0]} in the RoPE dict and {found[1]} at the top of the config; make "
            "them equal."
        )
    return found[0] if found else default


def _rotary_dim(head_dim: int, partial: float) -> int | None:
    dims = int(head_dim * partial)
    if dims == head_dim:
        return None
    if dims % 2 or not 0 < dims < head_dim:
        raise ValueError(
            f"partial_rotary_factor={partial} of head_dim={head_dim} is {dims} dims, which is not "
            "an even number between 0 and the head dim."
        )
    return dims


def _scaling(kind: str, given: Mapping[str, Any], length: int, max_positions: int) -> RopeScaling:
    values: dict[str, Any] = {"factor": given.get("factor")}
    if kind != "linear":
        values["original_max_seq_len"] = length
    for key in ("low_freq_factor", "high_freq_factor", "short_factor", "long_factor"):
        if key in given:
            values[key] = given[key]
    if kind in ("yarn", "longrope"):
        factor = float(given.get("factor") or max_positions / length)
        # A model run within its trained length may have a ratio below 1: no extension.
        values["factor"] = max(factor, 1.0) if kind == "longrope" else factor
        values["attention_factor"] = given.get("attention_factor")
    if kind == "yarn":
        # Falsy values mean the default in transformers, so 0 does here.
        values["beta_fast"] = given.get("beta_fast") or None
        values["beta_slow"] = given.get("beta_slow") or None
        values["truncate"] = given.get("truncate")
        if values["attention_factor"] is None:
            values["attention_factor"] = _mscale_ratio(given, values["factor"])
    return RopeScaling(type=kind, **values)  # type: ignore[arg-type]  # a key of _KEYS


def _mscale_ratio(given: Mapping[str, Any], factor: float) -> float | None:
    """DeepSeek's way to name YaRN's factor: two multiples of ln s, of which the ratio counts."""
    above, below = given.get("mscale"), given.get("mscale_all_dim")
    if not (above and below) or factor <= 1:
        return None
    return (0.1 * above * math.log(factor) + 1) / (0.1 * below * math.log(factor) + 1)


def rope_to_hf(config: ModelConfig, *, family: str) -> dict[str, Any]:
    """The keys of a `config.json` that say a model's RoPE, in the form that both versions read.

    "ntk" has no name there: it is written as the raised theta that it amounts to.

    Raises:
        ValueError: the family cannot say it.
    """
    scaling = config.rope_scaling
    keys: dict[str, Any] = {
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": config.max_seq_len,
    }
    if family == "phi3":
        keys["partial_rotary_factor"] = config.rotated_dims / config.head_dim
        if scaling is not None and scaling.type not in ("longrope", "ntk"):
            raise ValueError(f"family 'phi3' knows rope type 'longrope', not {scaling.type!r}.")
        keys[_LENGTH] = config.max_seq_len
    if scaling is None:
        return keys
    if scaling.type == "ntk":
        keys["rope_theta"] = raised_theta(
            config.rotated_dims, config.rope_theta, scaling, seq_len=1
        )
        return keys
    if scaling.type == "dynamic":
        keys["max_position_embeddings"] = scaling.original_max_seq_len
    written = _written(scaling, max_positions=config.max_seq_len)
    if family == "phi3":
        # Its class wants exactly these keys, under the old name of the type.
        keys[_LENGTH] = written.pop(_LENGTH)
        written = {"type": written.pop("rope_type"), **written}
    keys["rope_scaling"] = written
    return keys


def _written(scaling: RopeScaling, *, max_positions: int) -> dict[str, Any]:
    values: dict[str, Any] = {"rope_type": scaling.type}
    if scaling.type != "linear":
        values[_LENGTH] = scaling.original_max_seq_len
    if scaling.type == "dynamic":
        del values[_LENGTH]
    optional = ("factor", "attention_factor", "beta_fast", "beta_slow", "truncate")
    llama3 = ("low_freq_factor", "high_freq_factor")
    for name in (*optional, *llama3):
        if getattr(scaling, name) is not None:
            values[name] = getattr(scaling, name)
    if scaling.type == "longrope":
        values["short_factor"] = list(scaling.short_factor or ())
        values["long_factor"] = list(scaling.long_factor or ())
        if scaling.factor == max_positions / values[_LENGTH]:
            del values["factor"]  # what the reader computes from the two lengths
    return values
