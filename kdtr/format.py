r"""KDTR version 1, byte for byte.

KDTR carries named n-dimensional arrays, what each is for, how closely an implementation must match it, and where it
came from. This text is the whole specification: a reader or a writer can be built from it alone. Words in CAPITALS
are error classes. "Align" rounds up to a multiple. All numbers are little-endian; a byte range [a, b) excludes b.

Principle: one legal encoding. Equal content gives equal bytes; a number that can be derived is either absent or must
equal the derived value; whatever is unused is zero.

1. Parts of a file
------------------
    header (128) | index (128 * n) | names | metadata | zeros to 4096 | payloads | zeros to 4096

The part before the payloads is the prefix; `data_off = align4096(128 + 128*n + names_len + meta_len)` is its length
and is not stored. A checksum is XXH3, 64 bits, seed 0, as in the public xxHash specification; the checksum of no
bytes is 0x2D06800538D394C2, of the three bytes "abc" 0x78AF5F94892F3950. Checksums detect accidents, not attackers.

2. Header, 128 bytes
--------------------
    offset  type      field           meaning
    0       u8[8]     magic           89 4B 44 54 52 0D 0A 1A  (\x89 K D T R CR LF ^Z: shows text-mode damage)
    8       u16       major           1
    10      u16       minor           0; any value is accepted
    12      u32       required_flags  0; a bit set here means a feature that a reader must know
    16      u64       file_size       whole file, a multiple of 4096
    24      u32       n_tensors       n, at most 2^20
    28      u32       names_len       at most 64 MiB
    32      u32       meta_len        at most 16 MiB
    36      u32       kind_version    version of the kind's schema
    40      u8[32]    kind            1 to 32 bytes in 0x21..0x7E, then zeros to the end of the field
    72      u8[40]    reserved        zeros
    112     u64       prefix_sum      checksum of [128, data_off)
    120     u64       header_sum      checksum of [0, 120)

3. Index, one record of 128 bytes a tensor
------------------------------------------
Records are sorted by name, strictly ascending as byte strings (a proper prefix comes first).

    offset  type      field     meaning
    0       u32       name_off  start of the name in `names`: the sum of the name_len of all records before
    4       u16       name_len  1 to 255
    6       u8        dtype     section 5
    7       u8        ndim      0 to 8
    8       u64       offset    start of the payload in the file: section 4
    16      u64       nbytes    ceil(numel * bits / 8); numel is the product of the dims, 1 when ndim is 0
    24      u64       data_sum  checksum of the nbytes payload bytes
    32      u64[8]    dim       extents, slowest first; zeros past ndim; each at most 2^48
    96      u8        role      section 6
    97      u8        cmp       section 7
    98      u16       flags     0
    100     u32       max_ulp   section 7
    104     f64       atol      section 7
    112     f64       rtol      section 7
    120     f64       limit     section 7

The product of the non-zero dims is at most 2^48. `names` is the names joined without separators, wholly used.

A name is 1 to 255 bytes: segments of [A-Za-z0-9_.+=,@%\[\]-], at least one byte each, joined by single "/" (none
leading or trailing); no segment is "." or "..". Other characters are percent-escaped by whoever converts from another
format.

4. Payloads
-----------
In index order: offset[0] = data_off, offset[i+1] = align256(offset[i] + nbytes[i]), file_size = align4096(end of the
last), or data_off without tensors. So every payload is 256-byte aligned in the file and in one copy of the payload
section, and an empty tensor takes the cursor and no space. All bytes between and after payloads are zero. Elements
are in C order (last index fastest), little-endian, complex as real then imaginary.

5. Element types
----------------
    code name            bits     code name            bits     code name             bits
     1   bool             8       11   bf16            16       21   f8_e3m4           8
     2   u8               8       12   f32             32       22   f8_e4m3           8
     3   i8               8       13   f64             64       23   f8_e4m3b11fnuz    8
     4   u16             16       14   c64             64       24   i4                4
     5   i16             16       15   c128           128       25   u4                4
     6   u32             32       16   f8_e4m3fn        8       26   i2                2
     7   i32             32       17   f8_e5m2          8       27   u2                2
     8   u64             64       18   f8_e4m3fnuz      8       28   f4_e2m1fn         4
     9   i64             64       19   f8_e5m2fnuz      8       29   f6_e2m3fn         6
    10   f16             16       20   f8_e8m0fnu       8       30   f6_e3m2fn         6

Every other code is a DTYPE error; 31 to 34 (i1, u1, complex of two f16, of two bf16) are reserved. Value semantics
are those of IEEE 754 and, for bf16 and below 16 bits, of the types of the same name in ml_dtypes (OCP FP8 and MX
where they define them). A bool is one byte, 0 or 1. Element i of a type of b < 8 bits takes bits [i*b, (i+1)*b) of
the payload read as one little-endian bit stream (byte 0 first, low bit first: of two 4-bit elements the first has the
low half); i4 and i2 are two's complement; spare bits of the last byte are zero.

6. Roles
--------
0 none, 1 input, 2 expected (asserted on), 3 param (weights), 4 intermediate, 5 aux. A tensor with role 2 has cmp !=
0: no golden can pass without asserting anything.

7. Compare modes
----------------
x is the tested element, g the golden one. The tested array has the golden's dtype and shape, else it fails. "Uses"
lists the only fields that may be non-zero.

    cmp name        uses                 passes when
    0   none        -                    always (nothing is asserted)
    1   bits        -                    all elements have equal bits
    2   equal       -                    all elements have equal values: NaN = NaN whatever its bits, -0 = +0
    3   close       atol, rtol, limit    |x - g| <= atol + rtol * |g|, but for a bad fraction of `limit`
    4   ulp         max_ulp, limit       |key(x) - key(g)| <= max_ulp, but for a bad fraction of `limit`
    5   similarity  limit                1 - 2 sum(x g) / sum(x^2 + g^2) <= limit
    6   nmse        limit                sum((x - g)^2) / sum(g^2) <= limit

- atol, rtol, limit are finite and >= 0 (-0.0 is not legal); limit <= 1 in modes 3 and 4. Mode 4 is for dtypes 10 to
  23 and 28 to 30 only.
- A complex element has two parts, any other element one. In modes 2 and 4 an element passes when all its parts pass. In
  mode 3 the |.| of a complex number is hypot(re, im). In modes 5 and 6 the sums run over parts.
- Modes 3 to 6, first: a part that is NaN in one and not in the other, infinite in one and not in the other, or
  infinite with other sign, fails the whole array, whatever the fraction or the limit. Parts that are non-finite and
  agree pass and count as 0 in both arrays afterwards (in mode 4, as equal).
- Modes 3, 5, 6 convert to float64 first (exact but for 64-bit integers, which round to nearest even) and compute in
  float64, each operation rounded by itself (no fused multiply-add); bool counts as 0 and 1.
- Bad fraction: the array passes when bad <= limit * numel, product in float64; numel counts elements. Without elements
  every mode passes.
- key(): the sign-and-magnitude code of the golden dtype as an integer, negative when the sign bit is set (so -0 and
  +0 have distance 0); f8_e8m0fnu has no sign, its key is its code. The difference is exact (f64 keys need 65 bits).
- Mode 5 is evaluated as sum((x - g)^2) / sum(x^2 + g^2), which is the same number without cancellation. In modes 5
  and 6 0/0 is 0; a result that is not finite fails. The order of summation is free.

8. Metadata
-----------
UTF-8 JSON, one object, in its only legal spelling: keys sorted by code point, none twice in an object, no white
space, strings escaping only `"` and `\` (by a backslash), the characters below U+0020 (\b \t \n \f \r, else \u00xx in
lower case) and nothing else; no unpaired surrogates; numbers only as integers within +-(2^53 - 1), no "-0", reals are
strings; true, false and null allowed; depth at most 16, the outer object counting 1.

Required keys:
    generator    {"name": string, "version": string}
    seed, rng    integer, string or null; string or null
    source       {"repo": string or null, "git_sha": string or null, "dirty": bool or null}
    libs         {library: version string}
    platform     {"arch": string or null, "os": string or null, "device": string or null}
    command      string or null
    kind_schema  "<kind>/<kind_version>" of the header
Optional: tensors {tensor name: {"desc": string, "dims": [string or null a dimension], "layout": string, "quant":
{"scale": tensor name, "block": [integers]}}}, parents [SHA-256 in hex], license, notes (strings). Further keys may be
added by minor versions and by users, at the top and in an entry of `tensors`; a reader ignores those it does not
know. Wall-clock time, host names and absolute paths do not belong here: they make equal data unequal.

9. Checks
---------
Normative: a reader does these in this order and reports the first that fails, by class. Levels: 1 `open` reads the
prefix only; 2 `verify` reads the payloads; 3 `validate` reads the metadata and applies the kind's schema. A reader
hands out a tensor's payload when level 1 and steps 17.1 and 17.3 of this tensor have passed, unless the caller asks
for unverified access. F is the real size of the file. Nothing is allocated before step 8 has passed, and then no more
than the prefix.

Level 1
     1  NOT_KDTR     one of the first min(8, F) bytes differs from the magic (a Git-LFS pointer is named as such)
     2  TRUNCATED    F < 128
     3  VERSION      major != 1
     4  HEADER_SUM   checksum of [0, 120) != header_sum
     5  UNSUPPORTED  required_flags != 0
     6  HEADER       a reserved byte != 0; kind empty, with a byte outside 0x21..0x7E or one after its first zero
     7  7.1 LIMIT    n_tensors, names_len or meta_len over its cap
        7.2 HEADER   file_size < data_off or not a multiple of 4096
     8  8.1 TRUNCATED  F < file_size
        8.2 TRAILING   F > file_size
     9  PREFIX_SUM   checksum of [128, data_off) != prefix_sum
    10  PADDING      a byte != 0 between the metadata and data_off
    Then 11 to 16 for the first record, for the second, and so on:
    11  INDEX        name_off != sum of the name_len before; name_off + name_len > names_len; flags != 0
    12  NAME         not of the grammar (or longer than 255 bytes); not greater than the name before
    13  DTYPE        code not in 1..30
    14  14.1 SHAPE   ndim > 8; a dim past ndim != 0
        14.2 LIMIT   a dim > 2^48; product of the non-zero dims > 2^48 (by division, before multiplying)
        14.3 SHAPE   nbytes != ceil(numel * bits / 8)
    15  LAYOUT       offset != the derived one; nbytes > file_size - offset
    16  16.1 UNSUPPORTED  role > 5; cmp > 6
        16.2 COMPARE      role 2 with cmp 0; mode 4 with a dtype that has no ULP; a tolerance the mode uses is negative
                          (sign bit set), NaN or infinite; limit > 1 in modes 3 and 4; an unused field has a bit set
    After the last record (and without any):
        11e INDEX    sum of all name_len != names_len
        15e LAYOUT   align4096(end of the last payload, or data_off) != file_size
Level 2, for the first tensor, for the second, and so on:
    17  17.1 DATA_SUM  checksum of the payload != data_sum
        17.2 PADDING   a byte != 0 between the payload and the next tensor's offset (after the last: file_size)
        17.3 VALUE     a bool byte > 1; a spare bit of a sub-byte type set
Level 3
    18  META         metadata not as in section 8 (bad UTF-8 or JSON, other spelling, required key missing or of another
                     type, `tensors` or a `scale` naming an absent tensor); kind unknown, or its schema violated

Classes outside the file: NOT_FOUND (no tensor of this name), TYPE (asked for as another dtype or rank, or a dtype
that this installation cannot hold), IO (the system refused; a file that shrinks after level 1 is TRUNCATED), ENCODE
(refused to write).

10. Writing
-----------
Same caps. The file appears under its name complete or not at all: written beside it in the same directory, prefix last,
synchronised, renamed. There is no appending and no writing in place: a map of the old file stays valid.

11. Versions
------------
major != 1 is refused. A change that an old reader must not ignore sets a bit of required_flags or raises major; so do
new dtype, role and cmp codes. minor may only add metadata keys. There is no partial understanding.
"""

from __future__ import annotations

from typing import Final

import numpy as np

MAGIC: Final = b"\x89KDTR\r\n\x1a"
MAJOR: Final = 1
MINOR: Final = 0

HEADER_SIZE: Final = 128
RECORD_SIZE: Final = 128
SECTION_ALIGN: Final = 4096
PAYLOAD_ALIGN: Final = 256

MAX_TENSORS: Final = 1 << 20
MAX_NAMES: Final = 64 << 20
MAX_META: Final = 16 << 20
MAX_NAME: Final = 255
MAX_NDIM: Final = 8
MAX_NUMEL: Final = 1 << 48
MAX_KIND: Final = 32
MAX_META_DEPTH: Final = 16
MAX_META_INT: Final = (1 << 53) - 1

NAME_PATTERN: Final = rb"(?!\.{1,2}(?:/|\Z))[A-Za-z0-9_.+=,@%\[\]-]+(?:/(?!\.{1,2}(?:/|\Z))[A-Za-z0-9_.+=,@%\[\]-]+)*"

ROLES: Final = ("none", "input", "expected", "param", "intermediate", "aux")
MODES: Final = ("none", "bits", "equal", "close", "ulp", "similarity", "nmse")

HEADER: Final = np.dtype(
    [
        ("magic", "V8"),
        ("major", "<u2"),
        ("minor", "<u2"),
        ("required_flags", "<u4"),
        ("file_size", "<u8"),
        ("n_tensors", "<u4"),
        ("names_len", "<u4"),
        ("meta_len", "<u4"),
        ("kind_version", "<u4"),
        ("kind", "V32"),
        ("reserved", "V40"),
        ("prefix_sum", "<u8"),
        ("header_sum", "<u8"),
    ]
)

RECORD: Final = np.dtype(
    [
        ("name_off", "<u4"),
        ("name_len", "<u2"),
        ("dtype", "u1"),
        ("ndim", "u1"),
        ("offset", "<u8"),
        ("nbytes", "<u8"),
        ("data_sum", "<u8"),
        ("dim", "<u8", (8,)),
        ("role", "u1"),
        ("cmp", "u1"),
        ("flags", "<u2"),
        ("max_ulp", "<u4"),
        ("atol", "<f8"),
        ("rtol", "<f8"),
        ("limit", "<f8"),
    ]
)
