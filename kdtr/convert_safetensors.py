"""safetensors, read and written here without its package: a length, a JSON header, payloads without gaps.

Source: https://github.com/huggingface/safetensors (README, "Format"). Reading is as strict as the reference reader: no
hole, overlap, trailing byte, duplicate or unknown key. Equal content gives equal bytes (metadata sorted).
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, Final

from kdtr import dtypes
from kdtr.foreign import BLOCK, DESCRIPTION, Blocks, ConvertError, Format, Item, Stored, read_exactly

_MAX_HEADER: Final = 100_000_000
_META: Final = "__metadata__"
_NAMES: Final = {
    "bool": "BOOL",
    "u8": "U8",
    "i8": "I8",
    "u16": "U16",
    "i16": "I16",
    "u32": "U32",
    "i32": "I32",
    "u64": "U64",
    "i64": "I64",
    "f16": "F16",
    "bf16": "BF16",
    "f32": "F32",
    "f64": "F64",
    "c64": "C64",
    "f8_e4m3fn": "F8_E4M3",
    "f8_e5m2": "F8_E5M2",
    "f8_e4m3fnuz": "F8_E4M3FNUZ",
    "f8_e5m2fnuz": "F8_E5M2FNUZ",
    "f8_e8m0fnu": "F8_E8M0",
    "f4_e2m1fn": "F4",
    "f6_e2m3fn": "F6_E2M3",
    "f6_e3m2fn": "F6_E3M2",
}
_DTYPES: Final = {theirs: ours for ours, theirs in _NAMES.items()}


class SafetensorsSource:
    """An open safetensors file. Raises CONVERT where header and payloads do not fit each other exactly."""

    def __init__(self, path: str, dropped: Callable[[str], bool], attributes: bool) -> None:
        self._path = path
        self._file = io.FileIO(path)
        try:
            header, start = self._header()
            text = header.pop(_META, {})
            if not (isinstance(text, dict) and all(isinstance(value, str) for value in text.values())):
                raise ConvertError(f"{_META} is not an object of strings", path=path)
            self.description = text[DESCRIPTION].encode() if DESCRIPTION in text else None
            self.text: Mapping[str, str] = {key: value for key, value in text.items() if key != DESCRIPTION}
            self._begins: dict[str, int] = {}
            self.tensors: dict[str, Stored] = {}
            spans = []
            for name, entry in header.items():
                if (found := self._entry(name, entry)) is None:
                    continue
                stored, begin, end = found
                spans.append((begin, end, name))
                if not dropped(name):
                    self._begins[name], self.tensors[name] = start + begin, stored
            self._check_cover(sorted(spans), os.fstat(self._file.fileno()).st_size - start)
        except BaseException:
            self.close()
            raise

    def blocks(self, name: str) -> Blocks:
        """Bytes of a tensor."""
        begin, nbytes = self._begins[name], self.tensors[name].nbytes
        for at in range(0, nbytes, BLOCK):
            self._file.seek(begin + at)
            yield read_exactly(self._file.read, min(BLOCK, nbytes - at), self._path, name)

    def close(self) -> None:
        """Give the file back."""
        self._file.close()

    def _header(self) -> tuple[dict[str, Any], int]:
        size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._file.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER, size - 8):
            raise ConvertError(
                f"is not safetensors: a header of {length} bytes in a file of {size} (at most {_MAX_HEADER})",
                path=self._path,
            )
        data = read_exactly(self._file.read, length, self._path, _META)
        try:
            if data[:1] != b"{":
                raise ValueError(f"starts with {data[:1]!r}")
            header = json.loads(data.decode(), object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise ConvertError(f"is not safetensors: the header is not JSON: {error}", path=self._path) from error
        return header, 8 + length

    def _entry(self, name: str, entry: Any) -> tuple[Stored, int, int]:
        def fail(message: str) -> ConvertError:
            return ConvertError(message, path=self._path, tensor=name)

        if not (isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"}):
            raise fail(f"its header entry must hold dtype, shape and data_offsets: {str(entry)[:80]}")
        theirs, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not (isinstance(theirs, str) and theirs in _DTYPES):
            raise fail(f"has dtype {theirs!r}, which is not known here")
        if not (isinstance(shape, list) and all(_is_size(extent) for extent in shape)):
            raise fail(f"its shape is {str(shape)[:80]}, must be a list of sizes")
        if not (isinstance(offsets, list) and len(offsets) == 2 and all(_is_size(at) for at in offsets)):
            raise fail(f"its data_offsets are {str(offsets)[:80]}, must be two positions")
        stored = Stored(_DTYPES[theirs], tuple(shape))
        if math.prod(shape) * dtypes.BY_NAME[stored.dtype].bits % 8:
            raise fail(f"{stored} does not fill whole bytes")
        begin, end = offsets
        if end - begin != stored.nbytes:
            raise fail(f"{stored} takes {stored.nbytes} bytes, its data_offsets hold {end - begin}")
        return stored, begin, end

    def _check_cover(self, spans: list[tuple[int, int, str]], payload: int) -> None:
        cursor = 0
        for begin, end, name in spans:
            if begin != cursor:
                what = f"starts at {begin}, the tensors before it end at {cursor}"
                raise ConvertError(what, path=self._path, tensor=name)
            cursor = end
        if cursor != payload:
            raise ConvertError(f"the tensors take {cursor} bytes, the file holds {payload}", path=self._path)


def write_safetensors(path: str, items: list[Item], description: bytes, text: Mapping[str, str]) -> None:
    """Make a safetensors file, widest elements first, which aligns each; the description is one key of its metadata."""
    ordered = sorted(items, key=lambda item: (-dtypes.BY_NAME[item.stored.dtype].bits, item.name))
    header: dict[str, Any] = {_META: {DESCRIPTION: description.decode(), **dict(sorted(text.items()))}}
    cursor = 0
    for item in ordered:
        if item.name == _META:
            raise ConvertError("safetensors reserves this name", tensor=item.name)
        offsets = [cursor, cursor + item.stored.nbytes]
        header[item.name] = {
            "dtype": _NAMES[item.stored.dtype],
            "shape": list(item.stored.shape),
            "data_offsets": offsets,
        }
        cursor = offsets[1]
    data = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    if len(data) > _MAX_HEADER:
        raise ConvertError(f"needs a header of {len(data)} bytes; safetensors readers take at most {_MAX_HEADER}")
    with open(path, "xb") as file:
        file.write(len(data).to_bytes(8, "little"))
        file.write(data)
        for item in ordered:
            for block in item.blocks():
                file.write(block)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} comes twice")
    return out


SAFETENSORS: Final = Format("safetensors", frozenset(_NAMES), SafetensorsSource, write_safetensors)
