"""Asks the CUDA driver or CuPy what is there, and prints it as JSON: `gpu_probe.py driver` or `gpu_probe.py cupy`.

A process that has touched CUDA cannot fork safely, and a broken CuPy can end its process: so each question is asked in
a child process of its own. No context is created.
driver: missing (why no device can be used, or null), driver_cuda (newest CUDA that the driver serves), and of the first
device name, uuid, sm_count, compute_capability, memory_bytes. cupy: cupy, cuda_runtime, cupy_error.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import sys
import uuid
from typing import Any

SM_COUNT, CC_MAJOR, CC_MINOR = 16, 75, 76  # CUdevice_attribute


def ask_driver() -> dict[str, Any]:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {"missing": "no CUDA driver (libcuda.so.1 cannot be loaded)"}
    facts: dict[str, Any] = {"missing": None}
    version = ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(version)) == 0:
        facts["driver_cuda"] = _dotted(version.value)
    if (error := cuda.cuInit(0)) != 0:
        return {**facts, "missing": f"the CUDA driver does not start (cuInit: error {error})"}
    count = ctypes.c_int()
    if (error := cuda.cuDeviceGetCount(ctypes.byref(count))) != 0 or count.value == 0:
        return {**facts, "missing": f"the CUDA driver shows no device (error {error})"}
    device = ctypes.c_int()
    if (error := cuda.cuDeviceGet(ctypes.byref(device), 0)) != 0:
        return {**facts, "missing": f"the first CUDA device cannot be opened (error {error})"}

    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGetName(name, len(name), device)
    identity = (ctypes.c_ubyte * 16)()
    cuda.cuDeviceGetUuid(identity, device)
    memory = ctypes.c_size_t()
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    return {
        **facts,
        "name": name.value.decode("utf-8", "replace"),
        "uuid": f"GPU-{uuid.UUID(bytes=bytes(identity))}",
        "sm_count": attribute(SM_COUNT),
        "compute_capability": f"{attribute(CC_MAJOR)}.{attribute(CC_MINOR)}",
        "memory_bytes": memory.value,
    }


def ask_cupy() -> dict[str, Any]:
    if importlib.util.find_spec("cupy") is None:
        return {"cupy": None}
    try:
        cupy = importlib.import_module("cupy")
        return {"cupy": cupy.__version__, "cuda_runtime": _dotted(cupy.cuda.runtime.runtimeGetVersion())}
    except Exception as error:
        return {"cupy": None, "cupy_error": f"{type(error).__name__}: {error}"}


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


if __name__ == "__main__":
    print(json.dumps(ask_driver() if sys.argv[1:] == ["driver"] else ask_cupy()))
