"""Acceptance of the shipped pair on the shipped prompts, by the NumPy reference: `python -m datasets.evaluation`."""
