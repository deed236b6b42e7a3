"""The CUDA engine: build (`python -m engine build`), C ABI, operations. Importing it touches no CUDA and no CuPy."""
