"""ctypes structs of decoding against what a C compiler makes of the header; its numbers, its calls, its handles."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess

import pytest

from engine import abi, decode_abi
from engine.abi import Library
from engine.decode_abi import Handle
from engine.tests.test_abi import C_TYPES, COMPILER, INCLUDE, compiled, needs_compiler

HEADER = re.sub(r"/\*.*?\*/", "", (INCLUDE / "kdtree_decode.h").read_text(encoding="utf-8"), flags=re.DOTALL)
INCLUDED = '#include "kdtree_decode.h"\n'
STRUCTS: dict[str, type[ctypes.Structure]] = {
    "kdtree_tensor": decode_abi.Tensor,
    "kdtree_decoder_args": decode_abi.DecoderArgs,
    "kdtree_decoder_info": decode_abi.DecoderInfo,
    "kdtree_request": decode_abi.Request,
    "kdtree_run_args": decode_abi.RunArgs,
    "kdtree_request_state": decode_abi.RequestState,
    "kdtree_round": decode_abi.Round,
    "kdtree_prediction": decode_abi.Prediction,
    "kdtree_trace": decode_abi.Trace,
}
TYPES = {
    **C_TYPES,
    ctypes.c_float: "float",
    ctypes.c_double: "double",
    ctypes.c_char_p: "char*",
    decode_abi.I64: "int64_t*",
    ctypes.POINTER(decode_abi.Request): "kdtree_request*",
    ctypes.c_int32 * 3: "int32_t[3]",
    ctypes.c_int32 * 32: "int32_t[KDTREE_MAX_DEPTH + 1]",
    ctypes.c_double * 4: "double[4]",
}
ENUMS = {
    "KDTREE_STAGE_": decode_abi.STAGES,
    "KDTREE_": decode_abi.METHODS,
    "KDTREE_BUILDER_": decode_abi.BUILDERS,
    "KDTREE_DRAFT_": decode_abi.DRAFTERS,
    "KDTREE_GEMM_": decode_abi.GEMMS,
    "KDTREE_ATTENTION_": decode_abi.ATTENTIONS,
    "KDTREE_PATH_": decode_abi.PATHS,
    "KDTREE_KERNEL_": decode_abi.ATTENTION_KERNELS,
    "KDTREE_FINISH_": decode_abi.FINISHES,
}


def header_structs() -> dict[str, list[tuple[str, str]]]:
    """{struct: [(C type without const, field)]} as the header writes them; handles are void*."""
    structs = {}
    for match in re.finditer(r"typedef struct (\w+) \{(.*?)\} \1;", HEADER, re.DOTALL):
        fields: list[tuple[str, str]] = []
        for line in match[2].split(";")[:-1]:
            kind, names = re.fullmatch(r"\s*(?:const )?(\w+\*?) ([^;]+)", line).groups()  # type: ignore[union-attr]
            for declared in names.split(", "):
                star, name, size = re.fullmatch(r"(\*?)(\w+)(\[[^]]*\])?", declared).groups()  # type: ignore[union-attr]
                written = f"{kind}{star}{size or ''}".replace("size_t", "uint64_t").replace("kdtree_model*", "void*")
                fields.append((written, name))
        structs[match[1]] = fields
    return structs


def test_the_structs_hold_the_fields_of_the_header_in_order_and_type():
    found = {
        name: [(TYPES[kind], field) for field, kind in struct._fields_]  # type: ignore[misc]
        for name, struct in STRUCTS.items()
    }
    assert found == header_structs()


@needs_compiler
def test_the_structs_have_the_layout_that_a_c_compiler_gives_them(tmp_path):
    places = [(name, field[0]) for name, struct in STRUCTS.items() for field in struct._fields_]
    lines = [f'printf("%zu\\n", sizeof({name}));' for name in STRUCTS]
    lines += [
        f'printf("%zu %zu\\n", offsetof({name}, {field}), sizeof((({name}*)0)->{field}));' for name, field in places
    ]
    program = compiled(tmp_path, f"{INCLUDED}int main(void) {{ {' '.join(lines)} return 0; }}")
    said = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[: len(STRUCTS)] == [str(ctypes.sizeof(struct)) for struct in STRUCTS.values()]
    descriptors = [(name, field, getattr(STRUCTS[name], field)) for name, field in places]
    wanted = [f"{name}.{field}: {where.offset} {where.size}" for name, field, where in descriptors]
    assert [f"{n}.{f}: {line}" for (n, f), line in zip(places, said[len(STRUCTS) :], strict=True)] == wanted


@needs_compiler
def test_the_numbers_of_the_header_are_those_used_here(tmp_path):
    names = [
        f"KDTREE_{word.upper()}" if word == "running" else f"{prefix}{word.upper()}"
        for prefix, words in ENUMS.items()
        for word in words
    ]
    lines = (f'printf("%d\\n", (int){name});' for name in names)
    program = compiled(tmp_path, f"{INCLUDED}int main(void) {{ {' '.join(lines)} return 0; }}")
    said = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    assert list(map(int, said)) == [number for words in ENUMS.values() for number in range(len(words))]
    assert len(re.findall(r"KDTREE_\w+ = \d+", HEADER)) == len(names)


def test_every_call_of_the_header_has_its_prototype():
    written = {
        "uint64_t": ctypes.c_uint64,
        "kdtree_model*": ctypes.c_void_p,
        "kdtree_decoder*": ctypes.c_void_p,
        "kdtree_run*": ctypes.c_void_p,
        **dict.fromkeys(("kdtree_model**", "kdtree_decoder**", "kdtree_run**"), ctypes.POINTER(ctypes.c_void_p)),
        "char*": ctypes.c_char_p,
        "int32_t": ctypes.c_int32,
        "int32_t*": ctypes.POINTER(ctypes.c_int32),
        "float*": abi.F32,
        **{f"{name}*": ctypes.POINTER(struct) for name, struct in STRUCTS.items()},
    }
    calls = re.findall(r"KDTREE_API (\w+) kdtree_(\w+)\(([^)]*)\);", HEADER)
    found = {
        name: tuple(
            written[a.rsplit(" ", 1)[0].removeprefix("const ")] for a in " ".join(arguments.split()).split(", ")
        )
        for result, name, arguments in calls
        if result == "kdtree_status"
    }
    assert found == decode_abi.CALLS
    assert tuple(name for result, name, _ in calls if result == "void") == decode_abi.DESTROYERS


STUB = """
static char place;
static int living = 0;
const char* kdtree_last_error(void) { return "kdtree_model: so it is"; }
int32_t kdtree_abi_version(void) { return %d; }
kdtree_status kdtree_model_create(const char* kind, kdtree_model** model) {
  if (kind[0] == 'x') return KDTREE_SIZE;
  ++living;
  *model = (kdtree_model*)&place;
  return KDTREE_OK;
}
kdtree_status kdtree_model_read(kdtree_model* model, const char* path) {
  return (char*)model == &place && path[0] == 'p' ? KDTREE_OK : KDTREE_POINTER;
}
void kdtree_model_destroy(kdtree_model* model) { living -= (char*)model == &place; }
KDTREE_API int32_t kdtree_living(void) { return living; }
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Library:
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no C compiler: {COMPILER} is not on PATH")
    text = INCLUDED + STUB % abi.VERSION + "int32_t kdtree_living(void);"
    return Library(compiled(tmp_path_factory.mktemp("stub"), text, "-shared", "-fPIC"))


def test_a_handle_is_destroyed_once_however_it_ends(stub):
    living = stub.function("living", ctypes.c_int32)
    with Handle(stub, "model", b"model") as one:
        other = Handle(stub, "model", b"drafter")
        assert living() == 2
        one.call("read", b"path")
        with pytest.raises(abi.PointerError, match="so it is"):
            one.call("read", b"other")
    assert living() == 1
    one.close()
    assert living() == 1
    with pytest.raises(ValueError, match="this model is closed"):
        one.call("read", b"path")
    del other
    assert living() == 0
    with pytest.raises(abi.SizeError):
        Handle(stub, "model", b"x")
    assert living() == 0
