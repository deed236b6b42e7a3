"""Run clang-format over every C++ and CUDA file that git tracks; --check only says which files would change."""

import subprocess
import sys


def main() -> int:
    patterns = ["*.hpp", "*.h", "*.cpp", "*.cu", "*.cuh"]
    files = subprocess.run(
        ["git", "ls-files", "--", *patterns], check=True, capture_output=True, text=True
    ).stdout.split()
    if not files:
        return 0
    mode = ["--dry-run", "--Werror"] if "--check" in sys.argv[1:] else ["-i"]
    return subprocess.run(["clang-format", "--style=file", *mode, *files]).returncode


if __name__ == "__main__":
    raise SystemExit(main())
