"""Rules for every test: see harness.pytest_plugin."""

import os

# Before NumPy is loaded: threads slow the small products of the tests down.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["harness.pytest_plugin"]
