"""Conformance vectors: small files, and the verdict on each that every reader must reach.

    python -m kdtr.tests.make_vectors      writes kdtr/tests/vectors/*.kdtr and vectors.json

An entry of vectors.json is {file, sha256, level, expect, tensor}: reading up to `level` gives `expect` (OK or a class),
and below that level the file is OK. `tensor`, where present, is the tensor that the error must name.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdtr.tests.raw_file import BITS, DTYPES, MAGIC, ROLE, File, Tensor, metadata

VECTORS = Path(__file__).parent / "vectors"


@dataclass(frozen=True)
class Vector:
    name: str
    data: bytes
    level: int
    expect: str
    tensor: str | None = None


PAIR = (Tensor(b"a", shape=(2,)), Tensor(b"b", "i32", (3,)))
# Files of two pages are made only where a payload matters; the others have one.
EMPTY = (Tensor(b"a"), Tensor(b"b", "i32"))


def good() -> Iterator[Vector]:
    def ok(name: str, file: File, level: int = 3) -> Vector:
        return Vector(f"ok_{name}", file.to_bytes(), level, "OK")

    yield ok("no_tensors", File())
    yield ok("pair", File(PAIR))
    yield ok("scalar", File([Tensor(b"x", shape=())]))
    yield ok(
        "scalar_of_every_integer",
        File([Tensor(d.encode(), d, ()) for d in sorted(DTYPES) if d[0] in "iu" and BITS[d] > 7]),
    )
    yield ok("empty", File([Tensor(b"x")]))
    yield ok("empty_between", File([PAIR[0], Tensor(b"b", shape=(3, 0, 2)), Tensor(b"c", shape=(2,))]))
    yield ok("empty_of_huge_dims", File([Tensor(b"x", shape=(1 << 48, 0))]))
    yield ok("rank_8", File([Tensor(b"x", shape=(1, 2, 1, 2, 1, 2, 1, 2))]))
    packed = {d: (5 * BITS[d] + 7) // 8 for d in sorted(DTYPES) if BITS[d] < 8}
    ones = {d: ((1 << 5 * BITS[d]) - 1).to_bytes(nbytes, "little") for d, nbytes in packed.items()}
    yield ok("packed_odd", File([Tensor(d.encode(), d, (5,), data) for d, data in ones.items()]))
    yield ok("all_dtypes", File([Tensor(d.encode(), d, (2, 8)) for d in sorted(DTYPES)]))
    nans = struct.pack("<6I", 0x7FC00000, 0xFFC00001, 0x7F800001, 0x80000000, 1, 0xFF800000)
    yield ok("float_specials", File([Tensor(b"x", "f32", (6,), nans)]))
    yield ok(
        "integer_extremes",
        File(
            [
                Tensor(b"i", "i64", (2,), struct.pack("<2q", -(1 << 63), (1 << 63) - 1)),
                Tensor(b"u", "u64", (1,), b"\xff" * 8),
            ]
        ),
    )
    yield ok("payload_fills_its_page", File([Tensor(b"x", "u8", (4096,))]))
    yield ok("payload_one_past_its_page", File([Tensor(b"x", "u8", (4097,))]))
    yield ok(
        "payload_exactly_256", File([Tensor(b"a", "u8", (256,)), Tensor(b"b", "u8", (257,)), Tensor(b"c", "u8", (1,))])
    )
    yield ok(
        "prefix_fills_its_page",
        File([Tensor(b"x")], meta=metadata(notes="n" * (4096 - 128 - 128 - 1 - len(metadata(notes=""))))),
    )
    yield ok("many_names", File([Tensor(f"layer/{i:03}/w".encode()) for i in range(120)]))
    yield ok("name_of_255", File([Tensor(b"n" * 255)]))
    yield ok("name_characters", File([Tensor(b"%+,-.09=@AZ[]_az/x")]))
    yield ok("name_dots", File([Tensor(b".../.a/a.")]))
    yield ok(
        "names_sorted_as_bytes",
        File([Tensor(n) for n in (b"A", b"a", b"a-b", b"a.b", b"a/b", b"a0", b"ab", b"b")]),
    )
    yield ok("roles", File([Tensor(r.encode(), role=r, mode="bits") for r in sorted(ROLE)]))
    modes = [
        Tensor(b"bits", shape=(2,), mode="bits", role="expected"),
        Tensor(b"close", shape=(2,), mode="close", atol=1e-5, rtol=1e-3, limit=0.25, role="expected"),
        Tensor(b"close_zero", shape=(2,), mode="close", role="expected"),
        Tensor(b"equal", shape=(2,), mode="equal", role="expected"),
        Tensor(b"nmse", shape=(2,), mode="nmse", limit=5e-4, role="expected"),
        Tensor(b"similarity", shape=(2,), mode="similarity", limit=1e-6, role="expected"),
        Tensor(b"ulp", shape=(2,), mode="ulp", max_ulp=2, limit=0.01, role="expected"),
    ]
    yield ok("modes", File(modes))
    largest = math.nextafter(math.inf, 0)
    limits = [
        Tensor(b"close", mode="close", atol=largest, rtol=5e-324, limit=1.0),
        Tensor(b"nmse", mode="nmse", limit=largest),
        Tensor(b"similarity", mode="similarity", limit=2.0),
        Tensor(b"ulp", mode="ulp", max_ulp=(1 << 32) - 1, limit=1.0),
    ]
    yield ok("tolerance_extremes", File(limits))
    ulp = [Tensor(d.encode(), d, (8,), mode="ulp", max_ulp=1) for d in sorted(DTYPES) if d[0] in "fcb" and d != "bool"]
    yield ok("ulp_of_every_float", File(ulp))
    yield ok("minor_65535", File(EMPTY, header={"minor": 65535}))
    yield ok("kind_of_32", File(EMPTY, kind=b"!" + b"k" * 30 + b"~"), level=2)
    yield ok("kind_version_max", File(EMPTY, header={"kind_version": (1 << 32) - 1}), level=2)
    yield ok("metadata_any_bytes", File(EMPTY, meta=bytes(range(256))), level=2)
    yield ok("metadata_text", File(meta=metadata(notes='é€😀 \b\t\n\f\r\u0001\u001f"\\/\u007f\u2028')))
    yield ok("metadata_integers", File(meta=metadata(seed=(1 << 53) - 1, user=[-(1 << 53) + 1, 0, True, False, None])))
    deep: Any = []
    for _ in range(14):
        deep = [deep]
    yield ok("metadata_depth_16", File(meta=metadata(user=deep)))
    described = {"a": {"desc": "scaled", "dims": ["n"], "layout": "row", "quant": {"block": [1, 128], "scale": "b"}}}
    yield ok(
        "metadata_optional",
        File(EMPTY, meta=metadata(tensors=described, parents=["0" * 64], license="Apache-2.0", notes="")),
    )


def not_kdtr() -> Iterator[Vector]:
    def bad(name: str, data: bytes) -> Vector:
        return Vector(f"not_kdtr_{name}", data, 1, "NOT_KDTR")

    whole = File(EMPTY).to_bytes()
    for i in range(8):
        yield bad(f"byte_{i}", MAGIC[:i] + bytes([MAGIC[i] ^ 0x20]) + MAGIC[i + 1 :])
    yield bad("whole_file", bytes([whole[0] ^ 0x80]) + whole[1:])
    yield bad("one_byte", b"K")
    yield bad("cr_lost", whole.replace(b"\r\n", b"\n"))
    yield bad("cr_added", whole.replace(b"\n", b"\r\n"))
    yield bad("utf8", whole.decode("latin-1").encode())
    yield bad(
        "git_lfs_pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 8192\n"
    )
    yield bad("zip_empty", b"PK\x05\x06" + bytes(18))
    yield bad(
        "npy", b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (0,), }".ljust(127) + b"\n"
    )
    yield bad("safetensors_empty", struct.pack("<Q", 2) + b"{}")
    yield bad("hdf5", b"\x89HDF\r\n\x1a\n" + bytes(88))
    yield bad("gguf", b"GGUF" + struct.pack("<IQQ", 3, 0, 0))


def header() -> Iterator[Vector]:
    def bad(name: str, data: bytes, expect: str) -> Vector:
        return Vector(f"{expect.lower()}_{name}", data, 1, expect)

    def with_header(**fields: Any) -> bytes:
        return File(EMPTY, header=fields).to_bytes()

    whole = File(PAIR).to_bytes()
    for size in (0, 1, 7, 8, 127):
        yield bad(f"to_{size}", whole[:size], "TRUNCATED")
    for major in (0, 2, 65535):
        yield bad(str(major), with_header(major=major), "VERSION")
    yield bad("before_header_sum", File(EMPTY, header={"major": 2}, flip=[20]).to_bytes(), "VERSION")
    fields = {"minor": 10, "required_flags": 12, "file_size": 16, "n_tensors": 24, "names_len": 28, "meta_len": 32}
    fields |= {"kind_version": 36, "kind": 40, "reserved": 100, "prefix_sum": 112, "header_sum": 127}
    for name, at in fields.items():
        yield bad(name, File(EMPTY, flip=[at]).to_bytes(), "HEADER_SUM")
    yield bad("flag_0", with_header(required_flags=1), "UNSUPPORTED")
    yield bad("flag_31", with_header(required_flags=1 << 31), "UNSUPPORTED")
    yield bad("flag_before_reserved", with_header(required_flags=2, reserved=b"\1"), "UNSUPPORTED")
    yield bad("reserved_first", with_header(reserved=b"\1"), "HEADER")
    yield bad("reserved_last", with_header(reserved=bytes(39) + b"\x80"), "HEADER")
    yield bad("kind_empty", with_header(kind=b""), "HEADER")
    yield bad("kind_space", with_header(kind=b"a b"), "HEADER")
    yield bad("kind_delete", with_header(kind=b"a\x7f"), "HEADER")
    yield bad("kind_not_ascii", with_header(kind="é".encode()), "HEADER")
    yield bad("kind_after_zero", with_header(kind=b"any\0x"), "HEADER")
    yield bad("kind_after_zero_at_end", with_header(kind=b"any".ljust(31, b"\0") + b"x"), "HEADER")
    yield bad("kind_before_cap", with_header(kind=b"", n_tensors=(1 << 20) + 1), "HEADER")
    yield bad("tensors_over_cap", with_header(n_tensors=(1 << 20) + 1), "LIMIT")
    yield bad("tensors_2_32", with_header(n_tensors=(1 << 32) - 1), "LIMIT")
    yield bad("names_over_cap", with_header(names_len=(64 << 20) + 1), "LIMIT")
    yield bad("names_2_32", with_header(names_len=(1 << 32) - 1), "LIMIT")
    yield bad("meta_over_cap", with_header(meta_len=(16 << 20) + 1), "LIMIT")
    yield bad("cap_before_file_size", with_header(meta_len=(1 << 32) - 1, file_size=0), "LIMIT")
    yield bad("file_size_0", with_header(file_size=0), "HEADER")
    yield bad("file_size_below_prefix", with_header(n_tensors=1 << 20), "HEADER")
    yield bad("file_size_one_more", with_header(file_size=len(whole) + 1), "HEADER")
    yield bad("file_size_2_64", with_header(file_size=(1 << 64) - 1), "HEADER")
    caps = {"n_tensors": 1 << 20, "names_len": 64 << 20, "meta_len": 16 << 20, "file_size": 1 << 28}
    yield bad("counts_at_their_caps", with_header(**caps), "TRUNCATED")
    yield bad("file_size_2_64_less_4096", with_header(file_size=(1 << 64) - 4096), "TRUNCATED")
    yield bad("by_1", whole[:-1], "TRUNCATED")
    yield bad("by_4096", whole[:-4096], "TRUNCATED")
    yield bad("after_header", whole[:128], "TRUNCATED")
    yield bad("in_prefix", whole[:1000], "TRUNCATED")
    yield bad("in_last_payload", whole[: File(PAIR).offset(1) + 5], "TRUNCATED")
    yield bad("byte", whole + b"\0", "TRAILING")
    yield bad("page", whole + bytes(4096), "TRAILING")
    yield bad("page_of_no_tensors", File().to_bytes() + bytes(4096), "TRAILING")
    plain = File(EMPTY)
    for name, at in {"index": 140, "names": 384, "metadata": 390, "padding": plain.used + 5, "last_byte": 4095}.items():
        yield bad(name, File(EMPTY, flip=[at]).to_bytes(), "PREFIX_SUM")
    yield bad("wrong", with_header(prefix_sum=0), "PREFIX_SUM")
    yield bad("first", File(EMPTY, poke={plain.used: 1}).to_bytes(), "PADDING")
    yield bad("last", File(EMPTY, poke={4095: 0x80}).to_bytes(), "PADDING")
    yield bad("of_no_tensors", File(poke={4095: 1}).to_bytes(), "PADDING")
    yield bad("before_index", File([Tensor(b"a", raw={"flags": 1})], poke={4095: 1}).to_bytes(), "PADDING")


def wrapping_dims() -> tuple[int, int, int]:
    """Three odd dims below 2^48 whose product is 1 modulo 2^64."""
    a, b = (1 << 47) + 1, 3
    while (c := pow(a * b, -1, 1 << 64)) > 1 << 48:
        b += 2
    return a, b, c


def index() -> Iterator[Vector]:
    def bad(name: str, expect: str, file: File | Sequence[Tensor], tensor: str | None = None) -> Vector:
        file = file if isinstance(file, File) else File(file)
        return Vector(f"{expect.lower()}_{name}", file.to_bytes(), 1, expect, tensor)

    def record(**raw: Any) -> list[Tensor]:
        """A good tensor and one whose record is wrong."""
        return [Tensor(b"a"), Tensor(b"b", "i32", raw=raw)]

    yield bad("name_off_gap", "INDEX", record(name_off=2))
    yield bad("name_off_overlap", "INDEX", record(name_off=0))
    yield bad("name_off_2_32", "INDEX", record(name_off=(1 << 32) - 1))
    yield bad("name_off_of_first", "INDEX", File([Tensor(b"a", raw={"name_off": 1})], names=b"xa"))
    yield bad("name_past_names", "INDEX", record(name_len=2))
    yield bad("name_len_65535", "INDEX", record(name_len=65535))
    yield bad("names_left_over", "INDEX", File(EMPTY, names=b"abc"))
    yield bad("names_without_tensors", "INDEX", File(names=b"a"))
    yield bad("flag_0", "INDEX", record(flags=1))
    yield bad("flag_15", "INDEX", record(flags=1 << 15))

    bad_names = {
        "empty": b"", "not_ascii": "é".encode(), "zero_byte": b"b\0", "backslash": b"b\\c", "space": b"b c",
        "colon": b"b:c", "leading_slash": b"/b", "trailing_slash": b"b/", "double_slash": b"b//c", "slash": b"/",
        "dot": b".", "dots": b"..", "dot_inside": b"b/./c", "dots_first": b"../b", "dots_last": b"b/..",
        "of_256": b"b" * 256, "newline": b"b\n", "newline_inside": b"b\n/c",
    }  # fmt: skip
    for name, value in bad_names.items():
        yield bad(name, "NAME", [Tensor(value)])
    yield bad("unsorted", "NAME", [Tensor(b"b"), Tensor(b"a")])
    yield bad("unsorted_prefix", "NAME", [Tensor(b"ab"), Tensor(b"a")])
    yield bad("duplicate", "NAME", [Tensor(b"a"), Tensor(b"a")])
    yield bad("empty_second", "NAME", [Tensor(b"a"), Tensor(b"")])

    for code in (0, 31, 34, 255):
        yield bad(str(code), "DTYPE", record(dtype=code), "b")

    yield bad("ndim_9", "SHAPE", record(ndim=9), "b")
    yield bad("ndim_255", "SHAPE", record(ndim=255), "b")
    yield bad("dim_past_ndim", "SHAPE", record(dim=(0, 1)), "b")
    yield bad("dim_past_ndim_last", "SHAPE", record(dim=(0,) * 7 + (1,)), "b")
    yield bad("dim_of_scalar", "SHAPE", record(ndim=0, dim=(1,), nbytes=4), "b")
    yield bad("nbytes_less", "SHAPE", record(dim=(3,), nbytes=11), "b")
    yield bad("nbytes_more", "SHAPE", record(dim=(3,), nbytes=13), "b")
    yield bad("nbytes_zero", "SHAPE", record(dim=(3,), nbytes=0), "b")
    yield bad("nbytes_of_empty", "SHAPE", [Tensor(b"a", shape=(0, 3), raw={"nbytes": 12})], "a")
    yield bad("nbytes_of_packed", "SHAPE", [Tensor(b"a", "f6_e2m3fn", (5,), raw={"nbytes": 5})], "a")
    yield bad("dim_past_ndim_before_limit", "SHAPE", record(dim=((1 << 48) + 1, 1)), "b")
    yield bad("dim_2_48", "LIMIT", record(dim=((1 << 48) + 1,), nbytes=((1 << 48) + 1) * 4), "b")
    yield bad("dim_2_64", "LIMIT", record(dim=((1 << 64) - 1,)), "b")
    yield bad("product", "LIMIT", record(ndim=2, dim=((1 << 24) + 1, 1 << 24)), "b")
    yield bad("product_of_eight", "LIMIT", record(ndim=8, dim=(128,) * 8), "b")
    yield bad("product_wraps_to_zero", "LIMIT", record(ndim=2, dim=(1 << 32, 1 << 32), nbytes=0), "b")
    yield bad("product_wraps_to_one", "LIMIT", record(ndim=3, dim=wrapping_dims(), nbytes=4), "b")
    yield bad("product_with_zero", "LIMIT", record(ndim=3, dim=(1 << 48, 0, 2), nbytes=0), "b")
    yield bad("zero_and_dim", "LIMIT", record(ndim=2, dim=(0, (1 << 48) + 1), nbytes=0), "b")

    start = File(PAIR).offset(1)
    offsets = {
        "plus_1": start + 1, "plus_256": start + 256, "minus_256": start - 256, "in_prefix": 128, "zero": 0,
        "past_end": 8192, "far_past_end": 1 << 40, "2_64": (1 << 64) - 256,
    }  # fmt: skip
    for name, offset in offsets.items():
        tensors = [PAIR[0], Tensor(b"b", "i32", (3,), raw={"offset": offset})]
        yield bad(f"offset_{name}", "LAYOUT", File(tensors), "b")
    yield bad("longer_than_file", "LAYOUT", record(dim=(2000,), nbytes=8000), "b")
    yield bad("longer_by_one", "LAYOUT", [Tensor(b"a", "u8", (4096,), raw={"dim": (4097,), "nbytes": 4097})], "a")
    yield bad("huge", "LAYOUT", record(dim=(1 << 48,), nbytes=1 << 50), "b")
    yield bad("extra_page", "LAYOUT", File(PAIR, pages=1))
    yield bad("extra_page_of_no_tensors", "LAYOUT", File(pages=1))
    yield bad("extra_page_of_empty", "LAYOUT", File(EMPTY, pages=1))

    close = {"role": 2, "cmp": 3}
    yield bad("expected_without_mode", "COMPARE", record(role=2), "b")
    wrong = {"negative": -1.0, "negative_zero": -0.0, "nan": math.nan, "inf": math.inf, "smallest_negative": -5e-324}
    for key in ("atol", "rtol", "limit"):
        for name, tolerance in wrong.items():
            yield bad(f"{key}_{name}", "COMPARE", record(**close | {key: tolerance}), "b")
    above = math.nextafter(1, 2)
    yield bad("close_limit_above_1", "COMPARE", record(**close, limit=above), "b")
    yield bad("ulp_limit_above_1", "COMPARE", [Tensor(b"b", mode="ulp", limit=above)], "b")
    yield bad("ulp_limit_nan", "COMPARE", [Tensor(b"b", mode="ulp", limit=math.nan)], "b")
    yield bad("similarity_limit_negative", "COMPARE", [Tensor(b"b", mode="similarity", limit=-1.0)], "b")
    yield bad("nmse_limit_inf", "COMPARE", [Tensor(b"b", mode="nmse", limit=math.inf)], "b")
    unused = {
        "none": "max_ulp atol rtol limit", "bits": "max_ulp atol rtol limit", "equal": "max_ulp atol rtol limit",
        "close": "max_ulp", "ulp": "atol rtol", "similarity": "max_ulp atol rtol", "nmse": "max_ulp atol rtol",
    }  # fmt: skip
    for mode, keys in unused.items():
        for key in keys.split():
            yield bad(
                f"{mode}_with_{key}",
                "COMPARE",
                [Tensor(b"b", mode=mode, raw={key: 1 if key == "max_ulp" else 0.5})],
                "b",
            )
    yield bad("unused_negative_zero", "COMPARE", [Tensor(b"b", mode="bits", atol=-0.0)], "b")
    for dtype in ("bool", "u8", "i32", "i64", "i4", "u2"):
        yield bad(f"ulp_of_{dtype}", "COMPARE", [Tensor(b"b", dtype, mode="ulp")], "b")
    yield bad("role_6", "UNSUPPORTED", record(role=6), "b")
    yield bad("role_255", "UNSUPPORTED", record(role=255), "b")
    yield bad("cmp_7", "UNSUPPORTED", record(cmp=7), "b")
    yield bad("cmp_255", "UNSUPPORTED", record(cmp=255, role=2), "b")

    # Several faults in one file: the first in the order of the checks is reported.
    faults: dict[str, dict[str, Any]] = {
        "INDEX": {"flags": 1}, "DTYPE": {"dtype": 99}, "SHAPE": {"nbytes": 1}, "LAYOUT": {"offset": 1},
        "UNSUPPORTED": {"role": 9}, "COMPARE": {"atol": 1.0},
    }  # fmt: skip
    for i, expect in enumerate(faults):
        merged = {key: value for later in list(faults.values())[i:] for key, value in later.items()}
        yield bad("is_first", expect, record(**merged), None if expect == "INDEX" else "b")
    yield bad("is_first", "NAME", [Tensor(b"a"), Tensor(b"/", raw=faults["DTYPE"] | faults["LAYOUT"])])
    yield bad(
        "of_first_record", "COMPARE", [Tensor(b"a", raw=faults["COMPARE"]), Tensor(b"b", raw=faults["INDEX"])], "a"
    )
    yield bad("before_names_left_over", "COMPARE", File([Tensor(b"a", raw=faults["COMPARE"])], names=b"ab"), "a")
    yield bad("names_left_over_before_extra_page", "INDEX", File(PAIR, names=b"abc", pages=1))


def payload() -> Iterator[Vector]:
    def bad(name: str, expect: str, file: File, tensor: str) -> Vector:
        return Vector(f"{expect.lower()}_{name}", file.to_bytes(), 2, expect, tensor)

    plain = File(PAIR)
    first, second, end = plain.offset(0), plain.offset(1), len(plain.to_bytes())
    yield bad("first_byte", "DATA_SUM", File(PAIR, flip=[first]), "a")
    yield bad("last_byte", "DATA_SUM", File(PAIR, flip=[second + 11]), "b")
    yield bad("wrong", "DATA_SUM", File([Tensor(b"a", shape=(2,), raw={"data_sum": 1})]), "a")
    yield bad("of_empty", "DATA_SUM", File([Tensor(b"a", raw={"data_sum": 0})]), "a")
    yield bad("of_large", "DATA_SUM", File([Tensor(b"a", "u8", (3000,))], flip=[first + 1999]), "a")
    yield bad("after_payload", "PADDING", File(PAIR, poke={first + 8: 1}), "a")
    yield bad("before_next_payload", "PADDING", File(PAIR, poke={second - 1: 1}), "a")
    yield bad("after_last_payload", "PADDING", File(PAIR, poke={second + 12: 1}), "b")
    yield bad("last_of_file", "PADDING", File(PAIR, poke={end - 1: 1}), "b")
    yield bad("after_empty", "PADDING", File([PAIR[0], Tensor(b"b")], poke={end - 1: 1}), "b")
    for value in (2, 128, 255):
        yield bad(f"bool_{value}", "VALUE", File([Tensor(b"a", "bool", (3,), bytes([0, 1, value]))]), "a")
    yield bad("bool_inside", "VALUE", File([Tensor(b"a", "bool", (99,), bytes([1] * 50 + [3] + [1] * 48))]), "a")
    for dtype in (d for d in DTYPES if BITS[d] < 8):
        tensor = Tensor(b"a", dtype, (5,))
        used = 5 * BITS[dtype] % 8
        yield bad(
            f"spare_bit_{dtype}",
            "VALUE",
            File([Tensor(b"a", dtype, (5,), bytes(tensor.nbytes - 1) + bytes([1 << used]))]),
            "a",
        )
    yield bad("spare_bit_last", "VALUE", File([Tensor(b"a", "i2", (1,), b"\x80")]), "a")
    boolean = Tensor(b"a", "bool", (3,), bytes([0, 1, 2]))
    yield bad("is_first", "DATA_SUM", File([boolean], poke={first + 3: 1}, flip=[first]), "a")
    yield bad("before_value", "PADDING", File([boolean], poke={first + 3: 1}), "a")
    yield bad("of_first_tensor", "VALUE", File([boolean, PAIR[1]], flip=[second]), "a")


def meta() -> Iterator[Vector]:
    def bad(name: str, text: bytes, *, kind: bytes = b"any", tensors: Sequence[Tensor] = EMPTY) -> Vector:
        return Vector(f"meta_{name}", File(tensors, meta=text, kind=kind).to_bytes(), 3, "META")

    whole = metadata()
    required = ("command", "generator", "kind_schema", "libs", "platform", "rng", "seed", "source")
    yield bad("absent", b"")
    yield bad("not_json", whole[:-1])
    yield bad("not_an_object", b"[]")
    yield bad("utf8_invalid", metadata(notes="#").replace(b"#", b"\xff"))
    yield bad("utf8_overlong", metadata(notes="#").replace(b"#", b"\xc0\xaf"))
    yield bad("utf8_surrogate", metadata(notes="#").replace(b"#", b"\xed\xa0\x80"))
    yield bad("utf8_bom", b"\xef\xbb\xbf" + whole)
    yield bad("duplicate_key", whole.replace(b'"rng":null', b'"rng":null,"rng":null'))
    yield bad("unsorted_keys", whole.replace(b'"rng":null,"seed":null', b'"seed":null,"rng":null'))
    yield bad("white_space", whole.replace(b'"rng":null', b'"rng": null'))
    yield bad("newline_at_end", whole + b"\n")
    yield bad("zero_byte_at_end", whole + b"\0")
    yield bad("real", metadata(user=1.5))
    yield bad("exponent", whole.replace(b'"seed":null', b'"seed":1e3'))
    yield bad("minus_zero", whole.replace(b'"seed":null', b'"seed":-0'))
    yield bad("nan", whole.replace(b'"seed":null', b'"seed":NaN'))
    yield bad("integer_2_53", metadata(seed=1 << 53))
    yield bad("integer_minus_2_53", metadata(seed=-(1 << 53)))
    yield bad("integer_of_5000_digits", whole.replace(b'"seed":null', b'"seed":1' + b"0" * 5000))
    yield bad("escaped_slash", metadata(notes="#").replace(b"#", b"\\/"))
    yield bad("escaped_letter", metadata(notes="#").replace(b"#", b"\\u0061"))
    yield bad("escape_in_capitals", metadata(notes="#").replace(b"#", b"\\u001F"))
    yield bad("escape_of_tab", metadata(notes="#").replace(b"#", b"\\u0009"))
    yield bad("surrogate_escaped", metadata(notes="#").replace(b"#", b"\\ud800"))
    yield bad("control_character", metadata(notes="#").replace(b"#", b"\n"))
    yield bad("depth_17", metadata(user="#").replace(b'"#"', b"[" * 16 + b"]" * 16))
    yield bad("depth_1000", metadata(user="#").replace(b'"#"', b"[" * 1000 + b"]" * 1000))
    for key in required:
        yield bad(f"without_{key}", metadata(**{key: ...}))
    yield bad("seed_bool", metadata(seed=True))
    yield bad("rng_number", metadata(rng=1))
    yield bad("command_list", metadata(command=["a"]))
    yield bad("generator_without_version", metadata(generator={"name": "x"}))
    yield bad("source_dirty_text", metadata(source={"dirty": "no", "git_sha": None, "repo": None}))
    yield bad("platform_null", metadata(platform=None))
    yield bad("libs_number", metadata(libs={"numpy": 2}))
    yield bad("kind_schema_of_other_kind", metadata("tree"))
    yield bad("kind_schema_of_other_version", metadata("any", 2))
    yield bad("tensor_absent", metadata(tensors={"c": {"desc": "not there"}}))
    yield bad("scale_absent", metadata(tensors={"a": {"quant": {"block": [1], "scale": "c"}}}))
    yield bad("parents_not_hex", metadata(parents=["x"]))
    yield bad("notes_number", metadata(notes=1))
    yield bad("kind_unknown", metadata("no_such_kind"), kind=b"no_such_kind")
    yield bad("kind_violated", metadata("topk"), kind=b"topk", tensors=[Tensor(b"k", "i32", ())])


def vectors() -> list[Vector]:
    """All vectors, in order of names."""
    made = [v for group in (good, not_kdtr, header, index, payload, meta) for v in group()]
    if len({v.name for v in made}) != len(made):
        raise ValueError(f"vector named twice: {sorted(v.name for v in made)}")
    return sorted(made, key=lambda v: v.name)


def listing(made: Sequence[Vector]) -> str:
    """vectors.json, one vector a line."""
    rows = []
    for v in made:
        row = {
            "file": f"{v.name}.kdtr",
            "sha256": hashlib.sha256(v.data).hexdigest(),
            "level": v.level,
            "expect": v.expect,
        }
        rows.append(json.dumps(row | ({"tensor": v.tensor} if v.tensor else {})))
    return "[\n" + ",\n".join(rows) + "\n]\n"


def main() -> None:
    VECTORS.mkdir(exist_ok=True)
    made = vectors()
    for stale in {p.name for p in VECTORS.glob("*.kdtr")} - {f"{v.name}.kdtr" for v in made}:
        (VECTORS / stale).unlink()
    for v in made:
        (VECTORS / f"{v.name}.kdtr").write_bytes(v.data)
    (VECTORS / "vectors.json").write_text(listing(made))
    print(f"{len(made)} vectors, {sum(len(v.data) for v in made):,} bytes in {VECTORS}")


if __name__ == "__main__":
    main()
