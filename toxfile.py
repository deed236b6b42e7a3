"""tox loads this file by itself.

Where the interpreter that runs tox already holds the GPU stack (a host whose preinstalled stack must be used, often
without a network), the GPU environments use that interpreter and install nothing. KDTREE_PREINSTALLED=0 turns this off.
"""

import importlib.util
import os
import sys

GPU_STACK = ("numpy", "cupy", "pytest")

if os.environ.get("KDTREE_PREINSTALLED", "1") != "0" and all(importlib.util.find_spec(name) for name in GPU_STACK):
    os.environ.setdefault("KDTREE_GPU_DEPS", "")
    os.environ.setdefault("KDTREE_PYTHON", sys.executable)
