"""ctypes structs against what a C compiler makes of the header, field for field; versions, missing calls, errors."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from engine import abi
from engine.abi import Library, LibraryError, RequestError
from engine.sources import CUDA
from reference.sampling import TargetRowError
from reference.topk import DraftError

INCLUDE = CUDA / "include"
HEADERS = tuple((INCLUDE / name).read_text(encoding="utf-8") for name in ("kdtree_engine.h", "kdtree_heap_tree.h"))
STRUCTS: dict[str, type[ctypes.Structure]] = {
    "kdtree_device_info": abi.DeviceInfo,
    "kdtree_topk_logprob_args": abi.TopkLogprobArgs,
    "kdtree_tree_build_args": abi.TreeBuildArgs,
    "kdtree_target_choice_args": abi.TargetChoiceArgs,
    "kdtree_tree_accept_args": abi.TreeAcceptArgs,
    "kdtree_cache_view": abi.CacheView,
    "kdtree_kv_compact_args": abi.KvCompactArgs,
    "kdtree_mla_attention_args": abi.MlaAttentionArgs,
    "kdtree_heap_tree_args": abi.HeapTreeArgs,
}
C_TYPES = {
    ctypes.c_char * 64: "char",
    ctypes.c_float: "float",
    ctypes.c_int32: "int32_t",
    ctypes.c_uint32: "uint32_t",
    ctypes.c_int64: "int64_t",
    ctypes.c_uint64: "uint64_t",  # and size_t, which is the same type to ctypes
    ctypes.c_void_p: "void*",
    abi.F32: "float*",
    abi.F64: "double*",
    abi.I32: "int32_t*",
    abi.U32: "uint32_t*",
    abi.U64: "uint64_t*",
    abi.CacheView: "kdtree_cache_view",
}
COMPILER = os.environ.get("CC") or "gcc"
needs_compiler = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no C compiler: {COMPILER} is not on PATH")


def compiled(folder: Path, text: str, *flags: str, name: str = "made") -> Path:
    """A C file that includes the header, as a program or with "-shared" as a library."""
    source, made = folder / f"{name}.c", folder / name
    source.write_text(f'#include <stdio.h>\n#include "kdtree_engine.h"\n{text}\n')
    warnings = ("-Wall", "-Wextra", "-Werror", "-pedantic")
    command = [COMPILER, "-std=c99", *warnings, f"-I{INCLUDE}", *flags, str(source), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return made


def header_structs() -> dict[str, list[tuple[str, str]]]:
    """{struct: [(C type without const, field)]} as the headers write them."""
    text = re.sub(r"/\*.*?\*/", "", "".join(HEADERS), flags=re.DOTALL)
    structs = {}
    for match in re.finditer(r"typedef struct (\w+) \{(.*?)\} \1;", text, re.DOTALL):
        fields = (re.fullmatch(r"(?:const )?(.+?)\s+(\w+)(?:\[\d+\])?", line.strip()) for line in match[2].split(";"))
        structs[match[1]] = [(field[1].replace("size_t", "uint64_t"), field[2]) for field in fields if field]
    return structs


def test_the_structs_hold_the_fields_of_the_headers_in_order_and_type():
    found = {
        name: [(C_TYPES[kind], field) for field, kind in struct._fields_]  # type: ignore[misc]
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
    program = compiled(tmp_path, f"int main(void) {{ {' '.join(lines)} return 0; }}")
    said = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[: len(STRUCTS)] == [str(ctypes.sizeof(struct)) for struct in STRUCTS.values()]
    descriptors = [(name, field, getattr(STRUCTS[name], field)) for name, field in places]
    wanted = [f"{name}.{field}: {where.offset} {where.size}" for name, field, where in descriptors]
    assert [f"{n}.{f}: {line}" for (n, f), line in zip(places, said[len(STRUCTS) :], strict=True)] == wanted


@needs_compiler
def test_the_numbers_of_the_header_are_those_used_here(tmp_path):
    pairs = {
        "ABI_VERSION": abi.VERSION,
        "MAX_DEPTH": abi.MAX_DEPTH,
        "MAX_BUDGET": abi.MAX_BUDGET,
        "MAX_REQUESTS": abi.MAX_REQUESTS,
        "F32": abi.DTYPES["float32"],
        "BF16": abi.DTYPES["bfloat16"],
        **{f"ROUTE_{name.upper()}": number for number, name in enumerate(abi.ROUTES)},
        **{f"ATTENTION_{name.upper()}": number for number, name in enumerate(abi.ATTENTION_PATHS)},
        **{f"CACHE_{name.upper()}": number for number, name in enumerate(abi.CACHES)},
        **{re.sub("Error$", "", error.__name__).upper(): code for code, error in abi.ERRORS.items()},
    }
    lines = (f'printf("%d\\n", (int)KDTREE_{name});' for name in pairs)
    program = compiled(tmp_path, f"int main(void) {{ {' '.join(lines)} return 0; }}")
    said = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    assert dict(zip(pairs, map(int, said), strict=True)) == pairs


def test_every_call_of_the_header_has_its_structs_and_workspace_query():
    text = "".join(HEADERS)
    calls = re.findall(r"KDTREE_API \w+ kdtree_(\w+)\((const kdtree_\w+_args\*[^)]*)\);", text)
    wanted = {name: tuple(STRUCTS[s] for s in re.findall(r"const (\w+)\*", arguments)) for name, arguments in calls}
    assert wanted == abi.ARGUMENTS
    queries = re.findall(r"KDTREE_API size_t kdtree_(\w+)_workspace\(([^)]*)\);", text)
    assert {name: arguments.count("int32_t ") for name, arguments in queries} == abi.WORKSPACES


STUB = """
static const char* text = "";
const char* kdtree_last_error(void) { return text; }
int32_t kdtree_abi_version(void) { return %d; }
kdtree_status kdtree_tree_accept(const kdtree_tree_accept_args* args) {
  text = "kdtree_tree_accept: \\xff so it is";
  return args->struct_size == sizeof(*args) ? (kdtree_status)args->requests : KDTREE_VERSION;
}
const char* kdtree_architectures(void) { return "sm_90a ptx_80"; }
kdtree_status kdtree_device_query(kdtree_device_info* info) {
  const char name[] = "Old Card";
  for (unsigned i = 0; i < sizeof(name); i++) info->name[i] = name[i];
  info->compute_capability = 75 + info->device;
  info->usable = info->device > 0;
  return KDTREE_OK;
}
kdtree_heap_tree_result kdtree_heap_tree(const kdtree_heap_tree_args* args) {
  return (kdtree_heap_tree_result)args->requests;
}
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """A library of two calls, whose status is what they get as requests."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no C compiler: {COMPILER} is not on PATH")
    return Library(compiled(tmp_path_factory.mktemp("stub"), STUB % abi.VERSION, "-shared", "-fPIC"))


@pytest.mark.parametrize(("code", "error"), [*abi.ERRORS.items(), (99, abi.EngineError)])
def test_a_status_is_raised_as_its_error_with_the_librarys_message(stub, code, error):
    with pytest.raises(error, match="kdtree_tree_accept: � so it is") as caught:
        stub.call("tree_accept", abi.TreeAcceptArgs(requests=code))
    assert type(caught.value) is error
    assert error.code in (code, None)


def test_a_call_that_went_well_raises_nothing(stub):
    stub.call("tree_accept", abi.TreeAcceptArgs(requests=0))


@pytest.mark.parametrize(
    ("result", "error"),
    [(2, abi.SizeError), (3, abi.PointerError), (4, abi.WorkspaceError), (5, abi.VersionError), (9, abi.EngineError)],
)
def test_results_of_the_heap_are_raised_as_the_same_errors(stub, result, error):
    with pytest.raises(error, match=r"^kdtree_heap_tree: ") as caught:
        stub.call("heap_tree", abi.HeapTreeArgs(requests=result))
    assert type(caught.value) is error
    stub.call("heap_tree", abi.HeapTreeArgs(requests=1))  # a refused request has its status


def test_a_missing_call_is_told_when_it_is_used(stub):
    with pytest.raises(LibraryError, match="made has no function kdtree_kv_compact"):
        stub.call("kv_compact", abi.KvCompactArgs())
    with pytest.raises(LibraryError, match="no function kdtree_tree_build_workspace"):
        stub.workspace("tree_build", 1, 1, 1, 1)


@needs_compiler
def test_a_library_of_another_version_or_none_is_refused(tmp_path):
    with pytest.raises(LibraryError, match=f"has version 7 of the C ABI, this package needs {abi.VERSION}"):
        Library(compiled(tmp_path, STUB % 7, "-shared", "-fPIC"))
    with pytest.raises(LibraryError, match="has no function kdtree_abi_version"):
        Library(compiled(tmp_path, "int nothing;", "-shared", "-fPIC", name="empty"))
    with pytest.raises(LibraryError, match=r"absent\.so cannot be loaded"):
        Library(tmp_path / "absent.so")


def test_the_loaded_library_says_what_it_was_built_for_and_names_devices(ops):
    library = ops.library
    assert (library.architectures == "host") == (type(ops.memory).__name__ == "HostMemory")
    count = library.device_count()
    assert count >= 1
    info = library.device(0)
    assert info.name
    assert info.usable == 1
    assert info.shared_memory_optin >= 96 * 1024
    with pytest.raises(abi.SizeError, match=f"device is {count}"):
        library.device(count)


def test_a_device_that_the_library_holds_no_code_for_is_named_with_what_it_was_built_for(stub):
    stub.require(1)
    said = r"device 0 \(Old Card\) has compute capability 7.5; made was built for sm_90a ptx_80"
    for _ in range(2):
        with pytest.raises(abi.UnsupportedError, match=said):
            stub.require(0)


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (RequestError(3, 1, 2, 40, True), DraftError("the logit is NaN", request=3, depth=2, token=40)),
        (RequestError(3, 2, 2, 40, True), DraftError("the logit is +inf", request=3, depth=2, token=40)),
        (RequestError(0, 1, 1, 5), DraftError("the log-probability is NaN", request=0, depth=1, rank=5)),
        (RequestError(0, 2, 1, 5), DraftError("the log-probability is +inf", request=0, depth=1, rank=5)),
        (RequestError(9, 6, 12, 0), TargetRowError(request=9, node=12)),
    ],
)
def test_a_failed_request_is_described_as_the_reference_does(error, wanted):
    assert str(error) == str(wanted)


def test_every_status_of_a_request_has_its_words():
    codes = re.findall(r"KDTREE_REQUEST_\w+ = (\d+)", HEADERS[0])
    assert len(codes) == 12
    said = {str(RequestError(4, int(code), 17, 23)) for code in codes[1:]}
    assert len(said) == 11
    assert all(text.startswith("request 4") and "17" in text for text in said)
    assert not any("unknown" in text for text in said)
    error = RequestError(4, 8, 17, 23)
    assert (error.request, error.code, error.place, error.detail) == (4, 8, 17, 23)
    assert str(error) == "request 4: nodes 23 and 17 are siblings with the same token"
    assert "token or rank 23: the logit or log-probability is NaN" in str(RequestError(4, 1, 17, 23, None))
    assert "unknown status 12 with place 17 and detail 23" in str(RequestError(4, 12, 17, 23))
