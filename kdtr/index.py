"""The index of a file: one record a tensor, checked as a whole (steps 11 to 16 of kdtr/format.py, section 9)."""

from __future__ import annotations

import math
import operator
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from kdtr import dtypes
from kdtr.errors import (
    CompareError,
    DTypeError,
    EncodeError,
    IndexRecordError,
    KDTRError,
    LayoutError,
    LimitError,
    NotFoundError,
    ShapeError,
    TensorNameError,
    UnsupportedError,
)
from kdtr.format import (
    MAX_NAME,
    MAX_NDIM,
    MAX_NUMEL,
    MODES,
    NAME_PATTERN,
    PAYLOAD_ALIGN,
    ROLES,
    SECTION_ALIGN,
)

Records = npt.NDArray[np.void]
Mask = npt.NDArray[np.bool_]

_MAX_FINITE: Final = int(np.finfo(np.float64).max.view(np.uint64))
_ONE: Final = int(np.float64(1).view(np.uint64))
# Largest legal bits of each tolerance field by compare mode. As integers the non-negative finite floats are exactly the
# patterns from 0 to the largest finite, so one comparison also refuses -0.0, negative, NaN and infinite.
_TOLERANCE_FIELDS: Final = ("max_ulp", "atol", "rtol", "limit")
_TOLERANCE_BOUNDS: Final = np.array(
    [
        [0, 0, 0, 0],  # none
        [0, 0, 0, 0],  # bits
        [0, 0, 0, 0],  # equal
        [0, _MAX_FINITE, _MAX_FINITE, _ONE],  # close
        [(1 << 32) - 1, 0, 0, _ONE],  # ulp
        [0, 0, 0, _MAX_FINITE],  # similarity
        [0, 0, 0, _MAX_FINITE],  # nmse
    ],
    dtype=np.uint64,
)
_EXPECTED: Final = ROLES.index("expected")
_ULP: Final = MODES.index("ulp")

_BITS: Final = np.zeros(256, np.uint64)
_IS_FLOAT: Final = np.zeros(256, np.bool_)
for _dtype in dtypes.DTYPES:
    _BITS[_dtype.code] = _dtype.bits
    _IS_FLOAT[_dtype.code] = _dtype.is_float

_NAME: Final = re.compile(NAME_PATTERN)
_IN_NAME: Final = np.zeros(256, np.bool_)
_IN_NAME[[code for code in range(256) if chr(code) == "/" or _NAME.fullmatch(b"x" + bytes([code]))]] = True
_SLASH, _DOT = b"/."


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How closely a tested array must match its golden; section 7 of kdtr/format.py has the exact arithmetic."""

    mode: str
    atol: float = 0.0
    rtol: float = 0.0
    max_ulp: int = 0
    limit: float = 0.0

    def __post_init__(self) -> None:
        if self.mode not in MODES[1:]:
            raise EncodeError(f"tolerance mode '{self.mode}' is none of {', '.join(MODES[1:])}")
        for name in _TOLERANCE_FIELDS:
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise EncodeError(f"tolerance {name} is {value!r}, not a plain number")
        if not (isinstance(self.max_ulp, int) and 0 <= self.max_ulp < 1 << 32):
            raise EncodeError(f"max_ulp is {self.max_ulp}, not an integer in 0..{(1 << 32) - 1}")
        fields = [self.max_ulp, *(_float_bits(getattr(self, name)) for name in _TOLERANCE_FIELDS[1:])]
        if fault := _tolerance_fault(MODES.index(self.mode), fields):
            raise EncodeError(fault)

    @classmethod
    def bits(cls) -> Tolerance:
        """Equal bits."""
        return cls("bits")

    @classmethod
    def equal(cls) -> Tolerance:
        """Equal values: NaN equals NaN, -0 equals +0."""
        return cls("equal")

    @classmethod
    def close(cls, atol: float, rtol: float, bad_fraction: float = 0.0) -> Tolerance:
        """|x - g| <= atol + rtol * |g|, but for a fraction of the elements."""
        return cls("close", atol=float(atol), rtol=float(rtol), limit=float(bad_fraction))

    @classmethod
    def ulp(cls, max_ulp: int, bad_fraction: float = 0.0) -> Tolerance:
        """At most `max_ulp` representable values apart in the golden's dtype, but for a fraction of the elements."""
        return cls("ulp", max_ulp=operator.index(max_ulp), limit=float(bad_fraction))

    @classmethod
    def similarity(cls, limit: float) -> Tolerance:
        """1 - 2 sum(x g) / sum(x^2 + g^2) <= limit."""
        return cls("similarity", limit=float(limit))

    @classmethod
    def nmse(cls, limit: float) -> Tolerance:
        """sum((x - g)^2) / sum(g^2) <= limit."""
        return cls("nmse", limit=float(limit))

    def __str__(self) -> str:
        bad = f", bad <= {self.limit:g}" if self.limit else ""
        return {
            "close": f"|x-g| <= {self.atol:g} + {self.rtol:g}|g|{bad}",
            "ulp": f"<= {self.max_ulp} ulp{bad}",
            "similarity": f"1-similarity <= {self.limit:g}",
            "nmse": f"nmse <= {self.limit:g}",
        }.get(self.mode, self.mode)


class TensorSpec(NamedTuple):
    """What a writer is told about a tensor before its payload: element type by name, shape, role, tolerance or None."""

    dtype: str
    shape: tuple[int, ...]
    role: str = "none"
    tolerance: Tolerance | None = None


class TensorInfo(NamedTuple):
    """What a file says about a tensor. `offset` and `nbytes` are those of the payload, `data_sum` its checksum."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    tolerance: Tolerance | None
    offset: int
    nbytes: int
    data_sum: int

    @property
    def spec(self) -> TensorSpec:
        """What a writer needs for the same tensor in another file."""
        return TensorSpec(self.dtype, self.shape, self.role, self.tolerance)


class Index(Mapping[str, TensorInfo]):
    """The tensors of a file by name, in the order of their names. `records` is the table itself, read-only."""

    __slots__ = ("names", "path", "records")

    def __init__(self, records: Records, names: tuple[str, ...], path: str | None) -> None:
        self.records = records
        self.names = names
        self.path = path

    def position(self, name: str) -> int:
        """Row of a tensor. Raises NOT_FOUND with the neighbours of the name."""
        at = bisect_left(self.names, name)
        if at < len(self.names) and self.names[at] == name:
            return at
        near = ", ".join(f"'{other}'" for other in self.names[max(0, at - 2) : at + 2]) or "none"
        raise NotFoundError(
            f"not among the {len(self.names)} tensors; nearest names: {near}", path=self.path, tensor=name
        )

    def at(self, row: int) -> TensorInfo:
        """The tensor of a row."""
        record = self.records[row]
        mode = MODES[record["cmp"]]
        tolerance = None
        if mode != "none":
            atol, rtol, limit = float(record["atol"]), float(record["rtol"]), float(record["limit"])
            tolerance = Tolerance(mode, atol, rtol, int(record["max_ulp"]), limit)
        return TensorInfo(
            self.names[row],
            dtypes.BY_CODE[int(record["dtype"])].name,
            tuple(record["dim"][: record["ndim"]].tolist()),
            ROLES[record["role"]],
            tolerance,
            int(record["offset"]),
            int(record["nbytes"]),
            int(record["data_sum"]),
        )

    def below(self, prefix: str) -> Index:
        """The tensors whose names start with `prefix`, without it. Raises NOT_FOUND if there is none."""
        first = bisect_left(self.names, prefix)
        last = first
        while last < len(self.names) and self.names[last].startswith(prefix):
            last += 1
        if first == last:
            self.position(prefix)
        return Index(self.records[first:last], tuple(name[len(prefix) :] for name in self.names[first:last]), self.path)

    def __getitem__(self, name: str) -> TensorInfo:
        return self.at(self.position(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        at = bisect_left(self.names, name)
        return at < len(self.names) and self.names[at] == name


def check_records(records: Records, blob: bytes, data_off: int, file_size: int, path: str | None) -> tuple[str, ...]:
    """Names of the tensors, after steps 11 to 15e. `blob` is all names joined.

    All records are judged at once; only the first faulty one is then explained in the order of the steps.
    """
    text = blob.decode("latin-1")  # one character a byte: keeps the order and the offsets of any bytes
    name_end = np.cumsum(records["name_len"], dtype=np.uint64)
    ends = name_end.tolist()
    starts = [0, *ends[:-1]]
    names = tuple([text[a:b] for a, b in zip(starts, ends, strict=False)])
    span = align(records["nbytes"], PAYLOAD_ALIGN)
    cursor = np.cumsum(span) - span + np.uint64(data_off)

    faulty = _faulty_names(records, blob, name_end, names) | _faulty_shapes(records) | _faulty_tolerances(records)
    faulty |= (records["offset"] != cursor) | (records["nbytes"] > np.uint64(file_size) - records["offset"])
    if faulty.any():
        row = int(faulty.argmax())
        previous = names[row - 1] if row else None
        _explain(row, records[row], names[row], previous, starts[row], len(blob), int(cursor[row]), file_size, path)

    named = ends[-1] if ends else 0
    if named != len(blob):
        raise IndexRecordError(f"the names take {named} bytes, the header says {len(blob)}", path=path)
    end = int(records["offset"][-1] + records["nbytes"][-1]) if ends else data_off
    if (expected := -(-end // SECTION_ALIGN) * SECTION_ALIGN) != file_size:
        raise LayoutError(f"the payloads end the file at {expected} bytes, the header says {file_size}", path=path)
    return names


def align(value: npt.NDArray[np.uint64], to: int) -> npt.NDArray[np.uint64]:
    """Rounded up to a multiple of a power of two."""
    return (value + np.uint64(to - 1)) & ~np.uint64(to - 1)


def _faulty_names(records: Records, blob: bytes, name_end: npt.NDArray[np.uint64], names: tuple[str, ...]) -> Mask:
    length = records["name_len"]
    faulty: Mask = (records["name_off"] != name_end - length) | (name_end > len(blob)) | (records["flags"] != 0)
    faulty |= (length == 0) | (length > MAX_NAME)
    faulty[1:] |= np.fromiter(map(operator.ge, names[:-1], names[1:]), np.bool_, max(0, len(names) - 1))

    byte = np.frombuffer(blob + b"//", np.uint8)  # two bytes to look ahead
    size = len(blob)
    boundary = np.zeros(size + 3, np.bool_)
    boundary[0] = True
    boundary[np.minimum(name_end, size)] = True
    slash = np.flatnonzero(byte[:size] == _SLASH)
    empty_segment = boundary[slash] | boundary[slash + 1] | (byte[slash + 1] == _SLASH)
    dot = np.flatnonzero(byte[:size] == _DOT)
    dot = dot[boundary[dot] | (byte[dot - 1] == _SLASH)]
    one = boundary[dot + 1] | (byte[dot + 1] == _SLASH)
    two = (byte[dot + 1] == _DOT) & (boundary[dot + 2] | (byte[np.minimum(dot + 2, size)] == _SLASH))
    outside = np.flatnonzero(~_IN_NAME[byte[:size]])
    wrong = np.concatenate([outside, slash[empty_segment], dot[one | two]])
    row = np.searchsorted(name_end, wrong.astype(np.uint64), side="right")
    faulty[row[row < len(names)]] = True
    return faulty


def count_elements(records: Records) -> tuple[npt.NDArray[np.uint64], Mask]:
    """Elements of each tensor, and where the product of the dims that are not 0 is over the cap (the count is void)."""
    used = np.arange(MAX_NDIM) < records["ndim"][:, None]
    dim = records["dim"]
    numel = np.ones(len(records), np.uint64)
    over = np.zeros(len(records), np.bool_)
    for axis in range(min(MAX_NDIM, int(records["ndim"].max(initial=0)))):
        factor = np.where(used[:, axis], np.maximum(dim[:, axis], 1), 1).astype(np.uint64)
        over |= numel > np.uint64(MAX_NUMEL) // factor
        numel *= factor
    numel[(used & (dim == 0)).any(axis=1)] = 0
    return numel, over


def payload_sizes(records: Records, numel: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Payload bytes of `numel` elements of each tensor."""
    sizes: npt.NDArray[np.uint64] = (numel * _BITS[records["dtype"]] + np.uint64(7)) >> np.uint64(3)
    return sizes


def _faulty_shapes(records: Records) -> Mask:
    numel, over = count_elements(records)
    unused = np.arange(MAX_NDIM) >= records["ndim"][:, None]
    faulty: Mask = over | (_BITS[records["dtype"]] == 0) | (records["ndim"] > MAX_NDIM)
    faulty |= np.where(unused, records["dim"], 0).any(axis=1) | (records["nbytes"] != payload_sizes(records, numel))
    return faulty


def _faulty_tolerances(records: Records) -> Mask:
    role, mode = records["role"], records["cmp"]
    faulty: Mask = (role >= len(ROLES)) | (mode >= len(MODES))
    faulty |= ((role == _EXPECTED) & (mode == 0)) | ((mode == _ULP) & ~_IS_FLOAT[records["dtype"]])
    bounds = _TOLERANCE_BOUNDS[np.minimum(mode, len(MODES) - 1)]
    for column, field in enumerate(_TOLERANCE_FIELDS):
        value = records[field]
        faulty |= (value if field == "max_ulp" else value.view(np.uint64)) > bounds[:, column]
    return faulty


def _explain(
    row: int,
    record: np.void,
    name: str,
    previous: str | None,
    name_start: int,
    names_len: int,
    cursor: int,
    file_size: int,
    path: str | None,
) -> NoReturn:
    """Raise for the first step that a faulty record fails."""

    def fail(error: type[KDTRError], message: str) -> NoReturn:
        raise error(message, path=path, tensor=name)

    def fail_unnamed(error: type[KDTRError], message: str) -> NoReturn:
        raise error(f"record {row}: {message}", path=path)

    value = {field: record[field].tolist() for field in record.dtype.names or ()}
    ndim, dim, nbytes, offset, role, mode = (value[k] for k in ("ndim", "dim", "nbytes", "offset", "role", "cmp"))
    if value["name_off"] != name_start:
        fail_unnamed(IndexRecordError, f"name_off is {value['name_off']}, the names before end at {name_start}")
    if value["name_len"] > names_len - name_start:
        fail_unnamed(
            IndexRecordError, f"the name ends at {name_start + value['name_len']}, past the {names_len} bytes of names"
        )
    if value["flags"]:
        fail_unnamed(IndexRecordError, f"flags are {value['flags']:#06x}, must be 0")
    if fault := name_fault(name.encode("latin-1")):
        fail_unnamed(TensorNameError, f"{fault}: {name!r}")
    if previous is not None and previous >= name:
        order = "twice" if previous == name else f"after '{previous}', out of order"
        fail_unnamed(TensorNameError, f"'{name}' comes {order}")
    if value["dtype"] not in dtypes.BY_CODE:
        fail(DTypeError, f"dtype code is {value['dtype']}, known are 1..{len(dtypes.DTYPES)}")
    dtype = dtypes.BY_CODE[value["dtype"]]
    if ndim > MAX_NDIM:
        fail(ShapeError, f"ndim is {ndim}, at most {MAX_NDIM}")
    if any(dim[ndim:]):
        fail(ShapeError, f"dims past ndim {ndim} are {dim[ndim:]}, must be 0")
    if max(dim) > MAX_NUMEL or math.prod(d for d in dim if d) > MAX_NUMEL:
        fail(
            LimitError, f"shape {tuple(dim[:ndim])}: a dim, or the product of those that are not 0, is over {MAX_NUMEL}"
        )
    if nbytes != (expected := dtype.nbytes(math.prod(dim[:ndim]))):
        fail(ShapeError, f"nbytes is {nbytes}, {dtype.name} {tuple(dim[:ndim])} takes {expected}")
    if offset != cursor:
        fail(LayoutError, f"offset is {offset}, must be {cursor}")
    if nbytes > file_size - offset:
        fail(LayoutError, f"the payload ends at {offset + nbytes}, past the {file_size} bytes of the file")
    if role >= len(ROLES):
        fail(UnsupportedError, f"role code is {role}, known are 0..{len(ROLES) - 1}")
    if mode >= len(MODES):
        fail(UnsupportedError, f"compare mode is {mode}, known are 0..{len(MODES) - 1}")
    if role == _EXPECTED and mode == 0:
        fail(CompareError, "is expected but has no tolerance: it would assert nothing")
    if mode == _ULP and not dtype.is_float:
        fail(CompareError, f"compare mode ulp on {dtype.name}, which has no ulp")
    fields = [value["max_ulp"], *(int(record[field].view(np.uint64)) for field in _TOLERANCE_FIELDS[1:])]
    if fault := _tolerance_fault(mode, fields):
        fail(CompareError, fault)
    raise AssertionError(f"{path}: tensor '{name}' was found faulty, but passes every step: {value}")


def name_fault(name: bytes) -> str | None:
    """What is wrong with a name, or None."""
    if not name:
        return "the name is empty"
    if len(name) > MAX_NAME:
        return f"the name has {len(name)} bytes, at most {MAX_NAME}"
    if not _NAME.fullmatch(name):
        return (
            "the name is not made of segments of [A-Za-z0-9_.+=,@%[]-] joined by single '/', none of them '.' or '..'"
        )
    return None


def _tolerance_fault(mode: int, fields: list[int]) -> str | None:
    """What is wrong with max_ulp and the bits of atol, rtol, limit for a compare mode, or None."""
    for name, bits, bound in zip(_TOLERANCE_FIELDS, fields, _TOLERANCE_BOUNDS[mode].tolist(), strict=True):
        if bits > bound:
            value = bits if name == "max_ulp" else float(np.uint64(bits).view(np.float64))
            allowed = (
                "0: the mode does not use it" if bound == 0 else "finite, >= 0" + (" and <= 1" if bound == _ONE else "")
            )
            return f"{name} is {value!r} for compare mode {MODES[mode]}, must be {allowed}"
    return None


def _float_bits(value: float) -> int:
    return int(np.float64(value).view(np.uint64))
