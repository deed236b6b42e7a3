"""KDTR: golden data for kernels and decoders. See kdtr/format.py for the byte-level specification."""
