"""`python -m harness`; see harness.cli."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Before NumPy is loaded: threads slow small products down, and processor time then counts those that wait, too.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    from harness.cli import main

    sys.exit(main())
