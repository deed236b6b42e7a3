"""What the launches of the engine ask of the CUDA runtime, with a runtime of the test's own in its place.

It has several devices, counts its calls, and a kernel's fault shows when something waits for the device, as on a GPU.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine import build, sources
from engine.tests.backends import open_ops

OK, UNSUPPORTED, FAILED = 0, 6, 7  # kdtree_status
KIB = 1 << 10
OPTIN = {0: 227 * KIB, 1: 99 * KIB, 2: 163 * KIB}  # of the devices of the runtime below
RUNTIME = """
#include <atomic>
#include <map>
#include <mutex>
#include <utility>

#include "common/error.h"

namespace {
constexpr int kOptin[] = {227 << 10, 99 << 10, 163 << 10};
thread_local int current = 0;
std::atomic<int> attribute_calls{0}, set_calls{0}, fault{0}, waits{0}, found{0};
std::mutex mutex;
std::map<std::pair<const void*, int>, int> allowed;
}  // namespace

cudaError_t cudaGetLastError() { return static_cast<cudaError_t>(found.exchange(0)); }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorIllegalAddress"; }
const char* cudaGetErrorString(cudaError_t) { return "an illegal memory access was encountered"; }
cudaError_t cudaDeviceSynchronize() {
  ++waits;
  return static_cast<cudaError_t>(fault.load());
}
cudaError_t cudaGetDevice(int* device) { return *device = current, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int device) {
  ++attribute_calls;
  return *value = kOptin[device], cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  ++set_calls;
  if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
  const std::lock_guard lock(mutex);
  allowed[{kernel, current}] = value;
  return cudaSuccess;
}

#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT void set_device(int device) { current = device; }
EXPORT void set_fault(int now, int later) { found = now, fault = later; }
EXPORT int count_attributes() { return attribute_calls; }
EXPORT int count_sets() { return set_calls; }
EXPORT int count_waits() { return waits; }
EXPORT int launch(const char* kernel) { return kdtree::check_launch(kernel); }
EXPORT int allow(const void* kernel, size_t dynamic_bytes, size_t static_bytes) {
  return kdtree::allow_shared_memory(kernel, "some_kernel", dynamic_bytes, static_bytes);
}
EXPORT int allowed_to(const void* kernel) {
  const std::lock_guard lock(mutex);
  const auto at = allowed.find({kernel, current});
  return at == allowed.end() ? 0 : at->second;
}
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of common/error.cu on that runtime."""
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        pytest.skip(f"no C++ compiler: {compiler} is not on PATH")
    folder = tmp_path_factory.mktemp("runtime")
    (folder / "runtime.cpp").write_text(RUNTIME)
    files = [str(folder / "runtime.cpp"), str(sources.CUDA / "common" / "error.cu")]
    includes = [f"-I{include}" for include in sources.INCLUDES]
    options = ["-O1", "-shared", *build.HOST_FLAGS, *includes, "-x", "c++"]
    command = [compiler, *options, *files, "-o", str(folder / "runtime.so"), "-pthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "runtime.so"


@pytest.fixture
def runtime(path: Path, tmp_path: Path) -> ctypes.CDLL:
    """A copy of it, which has seen no call yet."""
    return opened(Path(shutil.copy(path, tmp_path / "runtime.so")))


def opened(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.allow.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
    library.allowed_to.argtypes = (ctypes.c_void_p,)
    library.launch.argtypes = (ctypes.c_char_p,)
    library.kdtree_last_error.restype = ctypes.c_char_p
    return library


# --- Shared memory


def test_a_kernel_is_allowed_its_shared_memory_once_on_each_device(runtime):
    for number, (kernel, device) in enumerate(itertools.product((16, 32), OPTIN), 1):
        runtime.set_device(device)
        for size in (60 * KIB, 90 * KIB, OPTIN[device] - 512, 0):
            assert runtime.allow(kernel, size, 512) == OK
            assert runtime.allowed_to(kernel) == OPTIN[device] - 512
        assert (runtime.count_sets(), runtime.count_attributes()) == (number, number)


def test_more_than_a_block_may_have_is_refused_with_static_and_dynamic_bytes(runtime):
    """Case C37: the limit counts both. Public issue: NVIDIA/warp#1701."""
    for device, optin in OPTIN.items():
        runtime.set_device(device)
        for before in (False, True):  # whether the kernel was allowed some already
            assert runtime.allow(16, optin - 1024 + 1, 1024) == UNSUPPORTED
            said = f"some_kernel: a block needs {optin - 1023} + 1024 bytes of shared memory, this device has {optin}"
            assert runtime.kdtree_last_error().decode() == said
            assert runtime.allowed_to(16) == (optin - 1024 if before else 0)
            assert runtime.allow(16, optin - 1024, 1024) == OK


def test_what_was_refused_is_asked_again(runtime):
    for number in (1, 2):
        assert runtime.allow(None, 60 * KIB, 0) == FAILED
        assert runtime.kdtree_last_error().startswith(b"some_kernel: cudaErrorIllegalAddress")
        assert runtime.count_sets() == number


def test_threads_on_several_devices_do_not_wait_for_what_others_were_allowed(runtime):
    def work(thread: int) -> list[tuple[int, int, int]]:
        wrong = []
        for turn in range(400):
            device, kernel, size = (thread + turn) % 3, 16 * (1 + turn % 7), (1 + (thread * turn) % 98) * KIB
            runtime.set_device(device)
            if runtime.allow(kernel, size, 0) != OK or runtime.allowed_to(kernel) < size:
                wrong.append((device, kernel, size))
        return wrong

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [[]] * 8
    assert 21 <= runtime.count_sets() <= 8 * 21


# --- Errors of launches


def launched(path: Path, now: int, later: int, **environment: str) -> list[str]:
    """What three launches give in a process of its own: status, message; at last the number of waits.

    now: error of the launch itself; later: of what the device still does.
    """
    text = (
        "import sys; from engine.tests.test_error import opened; r = opened(sys.argv[1]); r.launch(b'first_kernel')\n"
        f"r.set_fault({now}, {later})\n"
        "print(r.launch(b'second_kernel'), r.kdtree_last_error().decode())\n"
        "r.set_fault(0, 0); print(r.launch(b'third_kernel')); print(r.count_waits())"
    )
    kept = {name: value for name, value in os.environ.items() if name != "KDTREE_LAUNCH_BLOCKING"}
    command = [sys.executable, "-c", text, str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=sources.CHECKOUT, env={**kept, **environment}
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(("value", "waits"), [("1", True), ("0", False), ("", False), (None, False)])
def test_a_kernels_own_error_is_found_behind_it_where_launches_wait(path, value, waits):
    """Case C40. Public issue: NVIDIA/cuml#7906."""
    environment = {} if value is None else {"KDTREE_LAUNCH_BLOCKING": value}
    named = f"{FAILED} second_kernel: cudaErrorIllegalAddress: an illegal memory access was encountered"
    said = launched(path, 0, 700, **environment)
    assert said == [named if waits else "0 ", "0", "3" if waits else "0"]
    assert launched(path, 700, 0, **environment) == [named, "0", "2" if waits else "0"]


def test_the_engine_decodes_the_same_where_launches_wait():
    """The switch in the library itself, in a process of its own."""
    open_ops("host")
    text = (
        "import tempfile; from pathlib import Path; from engine.tests.backends import open_ops\n"
        "from engine.tests.decoding import PROMPT, World\n"
        "w = World(open_ops('host').library, Path(tempfile.mkdtemp()))\n"
        "print(w.engine().generate(PROMPT, max_new_tokens=5).tokens == w.plain(count=5).tokens)"
    )
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        cwd=sources.CHECKOUT,
        env={**os.environ, "KDTREE_LAUNCH_BLOCKING": "1"},
    )
    assert done.stdout == "True\n", done.stderr
