"""TOML tables to frozen dataclasses: every key is known and of the right type, or named."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key and what would work."""


def from_table[T](cls: type[T], table: Any, *, where: str = "") -> T:
    """Builds the dataclass ``cls`` from a TOML table.

    Fields may be bool, int, float, str, ``X | None``, ``tuple[X, ...]`` (a TOML array),
    ``dict[str, X]``, ``Literal`` and other dataclasses (a table).

    Args:
      cls: a dataclass.
      table: what ``tomllib`` returned.
      where: the table's own name, for messages.

    Raises:
      ConfigError: an unknown key (with near matches), a missing one, or a value of another
        type or outside its range.
    """
    if not isinstance(table, dict):
        raise ConfigError(f"[{where}] must be a table, got {table!r}")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in table:
        if key not in fields:
            raise ConfigError(_unknown(key, list(fields), where))
    for name, field in fields.items():
        needed = field.default is field.default_factory is dataclasses.MISSING
        if needed and name not in table:
            raise ConfigError(f"{_path(where, name)} is missing")
    values = {key: _value(hints[key], table[key], _path(where, key)) for key in table}
    try:
        return cls(**values)
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"[{where}] {error}" if where else str(error)) from error


def _path(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _unknown(key: str, known: list[str], where: str) -> str:
    near = difflib.get_close_matches(key, known, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    place = f"in [{where}]" if where else "at the top"
    return f"unknown key {key!r} {place}: {hint}known: {', '.join(known)}"


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (hint,) = (argument for argument in arguments if argument is not type(None))
        return _value(hint, value, where)
    if origin is typing.Literal:
        if value not in arguments:
            raise ConfigError(
                f"{where} must be one of {', '.join(map(repr, arguments))}, got {value!r}"
            )
        return value
    if origin is tuple:
        return _array(arguments, value, where)
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{where} must be a table, got {value!r}")
        return {key: _value(arguments[1], item, _path(where, key)) for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return from_table(hint, value, where=where)  # type: ignore[arg-type]
    return _scalar(hint, value, where)


def _array(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ConfigError(f"{where} must be an array, got {value!r}")
    if arguments[-1] is Ellipsis:
        arguments = (arguments[0],) * len(value)
    if len(arguments) != len(value):
        raise ConfigError(f"{where} must have {len(arguments)} items, got {len(value)}")
    pairs = zip(arguments, value, strict=True)
    return tuple(_value(hint, item, f"{where}[{i}]") for i, (hint, item) in enumerate(pairs))


def _scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    # bool is an int to Python, but `workers = true` is a mistake.
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where} must be of type {hint.__name__}, got {value!r}")
    return value
