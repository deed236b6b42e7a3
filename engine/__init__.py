"""The CUDA engine: its build (`python -m engine build`), C ABI and operations. Importing it touches no CUDA, no CuPy."""
