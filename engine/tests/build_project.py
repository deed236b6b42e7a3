"""A small project in the shape of engine/cuda, for the tests of how it is built: seconds in place of minutes."""

from __future__ import annotations

import shutil
from pathlib import Path

from engine import sources

FILES = {
    "sources.txt": """\
# a list
kernel kernels/plain.cu
kernel kernels/wide.cu wgmma # needs sm_90a
kernel common/plain.cpp
engine model/engine.cpp

ktest tests/test_kernel.cu
etest tests/test_engine.cpp
etest tests/test_c.c
ktest tests/test_skips.cu
demo demo/show.cpp
""",
    "include/answer.h": """\
#ifdef __cplusplus
extern "C"
#endif
__attribute__((visibility("default"))) int answer(void);
""",
    "kernels/part.h": "constexpr int kHalf = 21;\n",
    "kernels/plain.cu": """\
#include "kernels/part.h"
#include "answer.h"
#ifdef __CUDACC__
__global__ void plain(float* x) { *x = 2; }
#endif
#ifndef KDTREE_ARCHITECTURES
#define KDTREE_ARCHITECTURES "host"
#endif
extern "C" __attribute__((visibility("default"))) const char* architectures() { return KDTREE_ARCHITECTURES; }
int half() { return kHalf; }
""",
    "kernels/wide.cu": """\
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error not sm_90a
#endif
#ifdef __CUDACC__
__global__ void wide(float* x) { *x = 3; }
#endif
int twice(int x) { return 2 * x; }
""",
    "common/plain.cpp": """\
#include "answer.h"
int half();
int twice(int);
int answer(void) { return twice(half()); }
""",
    "model/engine.cpp": "int one() { return 1; }\n",
    "tests/test_kernel.cu": """\
#include "answer.h"
int one();
int main() { return answer() * one() == 42 ? 0 : 1; }
""",
    "tests/test_engine.cpp": '#include "answer.h"\nint main() { return answer() == 42 ? 0 : 1; }\n',
    "tests/test_c.c": '#include "answer.h"\nint main(void) { return answer() == 42 ? 0 : 1; }\n',
    "tests/test_skips.cu": """\
#include <cstdio>
int main() {
  puts("SKIP: no device");
  return 77;
}
""",
    "demo/show.cpp": '#include "answer.h"\nint main() { return answer() == 42 ? 0 : 1; }\n',
}


def make(folder: Path) -> Path:
    """Writes the project with the real CMakeLists.txt and scripts; returns what stands for engine/cuda."""
    root = folder / "project" / "engine" / "cuda"
    shutil.copytree(sources.CUDA / "scripts", root / "scripts")
    shutil.copy(sources.CUDA / "CMakeLists.txt", root)
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root
