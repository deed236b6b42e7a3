"""All differences between two files, bit for bit: kind, metadata, what is said about each tensor, payloads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from kdtr import dtypes
from kdtr.container import Container
from kdtr.errors import TensorTypeError
from kdtr.index import TensorInfo, TensorSpec

_BLOCK: Final = 3 << 20  # holds whole elements of every type, also of those with 6 bits
Progress = Callable[[int], object]
_ABSENT: Final = object()


class Difference(NamedTuple):
    """Where two files differ, in what, and what each has there, as text."""

    where: str
    what: str
    golden: str
    actual: str


def differences(golden: Container, actual: Container, progress: Progress | None = None) -> Iterator[Difference]:
    """Differences in the order of the format: header, metadata, tensors by name. Both files are verified first.

    Files without differences are equal byte for byte. `progress` is told the bytes of each step done, of both files.
    """
    tell = progress or (lambda nbytes: None)
    golden.verify(tell)
    actual.verify(tell)
    for what in ("kind", "kind_version"):
        one, other = getattr(golden, what), getattr(actual, what)
        if one != other:
            yield Difference("header", what, str(one), str(other))
    if golden.meta_bytes != actual.meta_bytes:
        yield from _of_meta("metadata", golden.meta, actual.meta)
    for name in sorted({*golden.names, *actual.names}):
        if name not in golden or name not in actual:
            one, other = (_said(each.info[name].spec if name in each else None) for each in (golden, actual))
            yield Difference(name, "tensor", one, other)
            continue
        ours, theirs = golden.info[name], actual.info[name]
        for what in ("dtype", "shape", "role", "tolerance"):
            one, other = getattr(ours, what), getattr(theirs, what)
            if one != other:
                yield Difference(name, what, _said(one), _said(other))
        if (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape):
            yield from _of_payloads(golden, actual, ours, tell)


def _of_meta(where: str, one: Any, other: Any) -> Iterator[Difference]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}):
            yield from _of_meta(f"{where}/{key}", one.get(key, _ABSENT), other.get(key, _ABSENT))
    elif isinstance(one, list) and isinstance(other, list):
        for i in range(max(len(one), len(other))):
            pair = [each[i] if i < len(each) else _ABSENT for each in (one, other)]
            yield from _of_meta(f"{where}/{i}", *pair)
    elif type(one) is not type(other) or one != other:
        yield Difference(where, "value", *("(none)" if each is _ABSENT else json.dumps(each) for each in (one, other)))


def _of_payloads(golden: Container, actual: Container, info: TensorInfo, progress: Progress) -> Iterator[Difference]:
    """Number of different elements, and the first of them with both values."""
    bits = dtypes.BY_NAME[info.dtype].bits
    count, first = 0, None
    for start in range(0, info.nbytes, _BLOCK):
        stop = min(info.nbytes, start + _BLOCK)
        one, other = (np.frombuffer(each.read_bytes(info.name, start, stop), np.uint8) for each in (golden, actual))
        progress(2 * (stop - start))
        if bits >= 8:
            bad = np.flatnonzero((one != other).reshape(-1, bits // 8).any(axis=1))
        else:
            pairs = np.unpackbits(one ^ other, bitorder="little")
            bad = np.flatnonzero(pairs[: pairs.size // bits * bits].reshape(-1, bits).any(axis=1))
        if bad.size and first is None:
            first = start * 8 // bits + int(bad[0])
        count += bad.size
    if first is not None:
        index, plural = [int(i) for i in np.unravel_index(first, info.shape)], "" if count == 1 else "s"
        values = [_element(each, info, first) for each in (golden, actual)]
        yield Difference(info.name, f"{count} element{plural}, first at {index}", *values)


def _element(container: Container, info: TensorInfo, at: int) -> str:
    """Value and bits of an element; only its bits for a type that needs ml_dtypes where it is missing."""
    dtype = dtypes.BY_NAME[info.dtype]
    begin, end = at * dtype.bits, (at + 1) * dtype.bits
    data = container.read_bytes(info.name, begin // 8, -(-end // 8))
    code = int.from_bytes(data, "little") >> begin % 8 & (1 << dtype.bits) - 1
    shown = f"0x{code:0{-(-dtype.bits // 4)}x}"
    try:
        value = np.frombuffer(code.to_bytes(-(-dtype.bits // 8), "little"), dtype.numpy())[0]
    except TensorTypeError:
        return shown
    return f"{value!s} ({shown})"


def _said(value: Any) -> str:
    """What a file says about a tensor, as text."""
    if value is None:
        return "(none)"
    if isinstance(value, TensorSpec):
        return f"{value.dtype} {list(value.shape)} {value.role}"
    return str(list(value)) if isinstance(value, tuple) else str(value)
