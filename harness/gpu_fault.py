"""Whether the device of this process has run into an error that nobody was told of yet.

A kernel's fault is found by a later call, and by every call from then on: without asking after each test, the next test
is blamed for it, and all that follow. Public issue: NVIDIA/cuml#7906.
"""

from __future__ import annotations

import ctypes
from typing import Any

NO_CONTEXT = (3, 201)  # CUDA_ERROR_NOT_INITIALIZED, CUDA_ERROR_INVALID_CONTEXT: nothing ran on a device


def device_fault(driver: Any = None) -> str | None:
    """Wait for the current context's device; the name of the error it reports, or None. driver: libcuda if None."""
    if driver is None:
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return None
    error = int(driver.cuCtxSynchronize())
    if error == 0 or error in NO_CONTEXT:
        return None
    name = ctypes.c_char_p()
    driver.cuGetErrorName(error, ctypes.byref(name))
    return name.value.decode() if name.value else f"CUDA error {error}"
