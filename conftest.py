"""Rules for every test: see harness.pytest_plugin."""

import contextlib
import os

# Before NumPy is loaded: threads slow the small products of the tests down.
os.environ.setdefault("OMP_NUM_THREADS", "1")

with contextlib.suppress(ImportError):  # without it only its own tests fail
    from hypothesis import HealthCheck, settings

    # How long an example takes says how busy the machine is.
    settings.register_profile(
        "unhurried", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("unhurried")

pytest_plugins = ["harness.pytest_plugin"]
