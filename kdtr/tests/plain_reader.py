"""The checks of levels 1 and 2 once more, one by one on plain bytes: what the vectorised reader is held against."""

from __future__ import annotations

import math
import re
import struct

from xxhash import xxh3_64_intdigest

from kdtr.tests.raw_file import BITS, DTYPES, MAGIC

SEGMENT = re.compile(rb"[A-Za-z0-9_.+=,@%\[\]-]+")
FLOATS = {code for code, name in enumerate(DTYPES, start=1) if name[0] in "fbc" and name != "bool"}
LARGEST = struct.unpack("<d", b"\xff\xff\xff\xff\xff\xff\xef\x7f")[0]


class FailedError(Exception):
    pass


def verdict(data: bytes) -> str:
    """Class of the first check that fails, or OK."""
    try:
        _check(data)
    except FailedError as error:
        return str(error)
    return "OK"


def need(condition: bool, code: str) -> None:
    if not condition:
        raise FailedError(code)


def up(n: int, to: int) -> int:
    return (n + to - 1) // to * to


def _check(data: bytes) -> None:
    need(data[:8] == MAGIC[: len(data)], "NOT_KDTR")
    need(len(data) >= 128, "TRUNCATED")
    fields = struct.unpack("<8sHHIQIIII32s40sQQ", data[:128])
    _, major, _, flags, size, n, names_len, meta_len, _, kind, reserved, prefix_sum, header_sum = fields
    need(major == 1, "VERSION")
    need(xxh3_64_intdigest(data[:120]) == header_sum, "HEADER_SUM")
    need(flags == 0, "UNSUPPORTED")
    need(not any(reserved), "HEADER")
    need(re.fullmatch(rb"[\x21-\x7e]+\0*", kind) is not None, "HEADER")
    need(n <= 2**20 and names_len <= 64 * 2**20 and meta_len <= 16 * 2**20, "LIMIT")
    names_at = 128 + 128 * n
    used = names_at + names_len + meta_len
    data_off = up(used, 4096)
    need(size >= data_off and size % 4096 == 0, "HEADER")
    need(len(data) >= size, "TRUNCATED")
    need(len(data) <= size, "TRAILING")
    need(xxh3_64_intdigest(data[128:data_off]) == prefix_sum, "PREFIX_SUM")
    need(not any(data[used:data_off]), "PADDING")

    names = data[names_at : names_at + names_len]
    name_at, previous, cursor, tensors = 0, None, data_off, []
    for i in range(n):
        record = data[128 + 128 * i : 256 + 128 * i]
        name_off, name_len, dtype, ndim, offset, nbytes, data_sum = struct.unpack("<IHBBQQQ", record[:32])
        dims = struct.unpack("<8Q", record[32:96])
        role, mode, record_flags, max_ulp = struct.unpack("<BBHI", record[96:104])
        need(name_off == name_at and name_off + name_len <= names_len and record_flags == 0, "INDEX")
        name = names[name_off : name_off + name_len]
        segments = name.split(b"/")
        need(1 <= name_len <= 255, "NAME")
        need(all(SEGMENT.fullmatch(s) and s not in (b".", b"..") for s in segments), "NAME")
        need(previous is None or previous < name, "NAME")
        need(1 <= dtype <= 30, "DTYPE")
        need(ndim <= 8 and not any(dims[ndim:]), "SHAPE")
        need(max(dims) <= 2**48 and math.prod(d for d in dims if d) <= 2**48, "LIMIT")
        bits = math.prod(dims[:ndim]) * BITS[DTYPES[dtype - 1]]
        need(nbytes == up(bits, 8) // 8, "SHAPE")
        need(offset == cursor and offset + nbytes <= size, "LAYOUT")
        need(role <= 5 and mode <= 6, "UNSUPPORTED")
        need(role != 2 or mode != 0, "COMPARE")
        need(mode != 4 or dtype in FLOATS, "COMPARE")
        need(mode == 4 or max_ulp == 0, "COMPARE")
        for field, modes, most in (
            (record[104:112], {3}, LARGEST),
            (record[112:120], {3}, LARGEST),
            (record[120:128], {3, 4, 5, 6}, 1.0 if mode in (3, 4) else LARGEST),
        ):
            (value,) = struct.unpack("<d", field)
            need((0 <= value <= most and not field[7] & 0x80) if mode in modes else not any(field), "COMPARE")
        tensors.append((dtype, bits, offset, nbytes, data_sum))
        name_at, previous, cursor = name_at + name_len, name, up(offset + nbytes, 256)
    end = tensors[-1][2] + tensors[-1][3] if tensors else data_off
    need(name_at == names_len, "INDEX")
    need(up(end, 4096) == size, "LAYOUT")

    stops = [*(offset for _, _, offset, _, _ in tensors[1:]), size]
    for (dtype, bits, offset, nbytes, data_sum), stop in zip(tensors, stops, strict=False):
        payload = data[offset : offset + nbytes]
        need(xxh3_64_intdigest(payload) == data_sum, "DATA_SUM")
        need(not any(data[offset + nbytes : stop]), "PADDING")
        need(dtype != 1 or set(payload) <= {0, 1}, "VALUE")
        need(bits % 8 == 0 or payload[-1] >> (bits % 8) == 0, "VALUE")
