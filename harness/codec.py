"""Strict conversion between frozen dataclasses and plain JSON values, driven by the type hints of the fields.

Supported hints: str, int, float, bool, None, Literal, unions of these, tuple[T, ...], dict[str, T] and dataclasses.
Nothing is guessed: a string never becomes a number, a bool is not an int, and only an int may stand for a float.
NumPy scalars and arrays become plain values here. A float that JSON cannot hold (NaN, inf) becomes None where the hint
allows None, and its place and its value are noted; elsewhere it is an error.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union

import numpy as np

T = TypeVar("T")


class FieldError(ValueError):
    """A value that does not fit its field; the message names the field, what was expected and what was found."""


def from_dict(cls: type[T], plain: Mapping[str, Any], place: str = "") -> T:
    """Make a `cls` from a mapping. Unknown, missing and misfitting fields raise FieldError naming them."""
    where = place or cls.__name__
    if not isinstance(plain, Mapping):
        raise FieldError(f"{where}: expected an object, found {plain!r}")
    hints = _hints(typing.cast(Any, cls))
    if unknown := sorted(set(map(str, plain)) - set(hints)):
        raise FieldError(f"{where}: unknown field {', '.join(unknown)}")
    if missing := [name for name in hints if name not in plain]:
        raise FieldError(f"{where}: missing field {', '.join(missing)}")
    return cls(**{name: fit(hint, plain[name], _join(place, name)) for name, hint in hints.items()})


def to_dict(value: Any) -> Any:
    """The plain JSON form of a dataclass whose fields are in normal form (see `normalise`)."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_dict(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [to_dict(item) for item in value]
    if isinstance(value, dict):
        return {key: to_dict(item) for key, item in value.items()}
    return value


def normalise(self: Any) -> dict[str, str]:
    """For __post_init__ of a frozen dataclass: put every field into normal form, in place.

    Returns {place: "NaN" | "infinite" | "-infinite"} for the floats that became None.
    """
    lost: dict[str, str] = {}
    for name, hint in _hints(self.__class__).items():
        object.__setattr__(self, name, fit(hint, getattr(self, name), name, lost))
    return lost


def fit(hint: Any, value: Any, place: str, lost: dict[str, str] | None = None) -> Any:
    """`value` in the normal form of `hint`, or FieldError. Floats that become None are noted in `lost`."""
    if isinstance(value, np.generic):
        value = value.item()
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return _fit_union(args, value, place, lost)
    if origin is Literal:
        if not any(value == choice and type(value) is type(choice) for choice in args):
            raise FieldError(f"{place}: expected one of {', '.join(map(repr, args))}, found {value!r}")
        return value
    if origin is tuple:
        if not isinstance(value, tuple | list | np.ndarray):
            raise FieldError(f"{place}: expected a list, found {value!r}")
        return tuple(fit(args[0], item, f"{place}[{i}]", lost) for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise FieldError(f"{place}: expected an object with string keys, found {value!r}")
        return {key: fit(args[1], item, _join(place, key), lost) for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        cls: Any = hint
        if isinstance(value, Mapping):
            value = from_dict(cls, value, place)
        if not isinstance(value, cls):
            raise FieldError(f"{place}: expected {cls.__name__}, found {value!r}")
        fields = {name: fit(h, getattr(value, name), _join(place, name), lost) for name, h in _hints(cls).items()}
        return cls(**fields)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise FieldError(f"{place}: expected {getattr(hint, '__name__', hint)}, found {value!r}")
    if hint is float and not math.isfinite(value):
        raise FieldError(f"{place}: expected a finite number, found {value!r}")
    return value


def _fit_union(args: tuple[Any, ...], value: Any, place: str, lost: dict[str, str] | None) -> Any:
    optional = type(None) in args
    if value is None and optional:
        return None
    if type(value) is float and not math.isfinite(value) and float in args and optional:
        if lost is not None:
            lost[place] = "NaN" if math.isnan(value) else "infinite" if value > 0 else "-infinite"
        return None
    members = [member for member in args if member is not type(None)]
    if type(value) in members:
        members = [type(value)]
    problems = []
    for member in members:
        try:
            return fit(member, value, place, lost)
        except FieldError as error:
            problems.append(str(error))
    raise FieldError("; or ".join(problems))


def _join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}
