"""From declarations to index records: where each payload will be (sections 3 and 4 of kdtr/format.py)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Final, NamedTuple, NoReturn

import numpy as np

from kdtr import dtypes
from kdtr.errors import EncodeError, KDTRError
from kdtr.format import (
    HEADER_SIZE,
    MAX_NAMES,
    MAX_NDIM,
    MAX_NUMEL,
    MAX_TENSORS,
    MODES,
    PAYLOAD_ALIGN,
    RECORD,
    RECORD_SIZE,
    ROLES,
    SECTION_ALIGN,
)
from kdtr.index import Records, TensorSpec, align, check_records, count_elements, payload_sizes

_DTYPE_CODE: Final = {dtype.name: dtype.code for dtype in dtypes.DTYPES}
_ROLE_CODE: Final = {name: code for code, name in enumerate(ROLES)}
_MODE_CODE: Final = {name: code for code, name in enumerate(MODES)}
_UNKNOWN: Final = 255
_MAX_FILE: Final = 1 << 62


class Layout(NamedTuple):
    """Records complete but for the sums, names in their order, and the sizes that go into the header."""

    records: Records
    names: bytes
    data_off: int
    file_size: int


def lay_out(names: Sequence[str], specs: Sequence[TensorSpec], meta_len: int, path: str) -> Layout:
    """Records of tensors whose names are sorted. Raises ENCODE, naming the first tensor that cannot be written."""

    def refuse(message: str, tensor: str | None = None) -> NoReturn:
        raise EncodeError(message, path=path, tensor=tensor)

    def first(faulty: Callable[[TensorSpec], bool]) -> tuple[str, TensorSpec]:
        return next((name, spec) for name, spec in zip(names, specs, strict=True) if faulty(spec))

    blob = "".join(names).encode()
    for what, size, cap in (("tensors", len(specs), MAX_TENSORS), ("bytes of names", len(blob), MAX_NAMES)):
        if size > cap:
            refuse(f"{size} {what}, at most {cap}")
    if (longest := max(names, key=len, default="")) and len(longest) > np.iinfo(np.uint16).max:
        refuse(f"the name has {len(longest)} bytes")

    codes = [_DTYPE_CODE.get(spec.dtype, _UNKNOWN) for spec in specs]
    if _UNKNOWN in codes:
        name, spec = first(lambda spec: spec.dtype not in _DTYPE_CODE)
        refuse(f"dtype {spec.dtype!r} is none of {', '.join(_DTYPE_CODE)}", name)
    roles = [_ROLE_CODE.get(spec.role, _UNKNOWN) for spec in specs]
    if _UNKNOWN in roles:
        name, spec = first(lambda spec: spec.role not in _ROLE_CODE)
        refuse(f"role {spec.role!r} is none of {', '.join(ROLES)}", name)
    ndims = [len(spec.shape) for spec in specs]
    if max(ndims, default=0) > MAX_NDIM:
        name, spec = first(lambda spec: len(spec.shape) > MAX_NDIM)
        refuse(f"shape {spec.shape} has {len(spec.shape)} dimensions, at most {MAX_NDIM}", name)
    dims = list(map(operator.index, chain.from_iterable(spec.shape for spec in specs)))
    if min(dims, default=0) < 0 or max(dims, default=0) > MAX_NUMEL:
        name, spec = first(lambda spec: any(not 0 <= dim <= MAX_NUMEL for dim in spec.shape))
        refuse(f"shape {spec.shape}: each dim must be in 0..{MAX_NUMEL}", name)

    records = np.zeros(len(specs), RECORD)
    records["name_len"] = [len(name) for name in names]
    records["name_off"] = np.cumsum(records["name_len"], dtype=np.uint64) - records["name_len"]
    records["dtype"], records["ndim"], records["role"] = codes, ndims, roles
    records["dim"][np.arange(MAX_NDIM) < records["ndim"][:, None]] = dims
    numel, over = count_elements(records)
    if over.any():
        row = int(over.argmax())
        refuse(f"shape {specs[row].shape}: the product of the dims that are not 0 is over {MAX_NUMEL}", names[row])
    records["nbytes"] = payload_sizes(records, numel)
    if (total := records["nbytes"].sum(dtype=np.float64)) > _MAX_FILE:
        refuse(f"about {total:.3g} bytes of payloads, at most {_MAX_FILE}")
    for row, spec in enumerate(specs):
        if (tolerance := spec.tolerance) is not None:
            for field in ("max_ulp", "atol", "rtol", "limit"):
                records[field][row] = getattr(tolerance, field)
            records["cmp"][row] = _MODE_CODE[tolerance.mode]

    prefix = HEADER_SIZE + RECORD_SIZE * len(specs) + len(blob) + meta_len
    data_off = -(-prefix // SECTION_ALIGN) * SECTION_ALIGN
    span = align(records["nbytes"], PAYLOAD_ALIGN)
    records["offset"] = np.cumsum(span) - span + np.uint64(data_off)
    end = int(records["offset"][-1] + records["nbytes"][-1]) if specs else data_off
    file_size = -(-end // SECTION_ALIGN) * SECTION_ALIGN
    try:
        check_records(records, blob, data_off, file_size, path)
    except KDTRError as error:  # the reader's own rules for names and tolerances
        raise EncodeError(error.message, path=path, tensor=error.tensor) from error
    return Layout(records, blob, data_off, file_size)
