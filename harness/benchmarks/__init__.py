"""Benchmarks of the pieces of a round, for `pytest --benchmark-only`; each result is compared with the reference."""
