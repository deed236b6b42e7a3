"""The fixture `ops` for every test of the engine."""

from engine.tests.backends import ops

__all__ = ["ops"]
