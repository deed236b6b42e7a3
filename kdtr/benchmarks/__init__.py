"""Speed of the container beside its neighbours.

`pytest --benchmark-only` measures; `python -m kdtr.benchmarks FILE.json` prints the tables again from what
`--benchmark-json=FILE.json` stored. KDTREE_BENCH_MIB sets the size of the large file (256; 1024 for the full
measurement). Files lie on /dev/shm where that has room, so that no disk is measured.
"""
