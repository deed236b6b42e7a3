"""Golden fixtures: every stage's inputs and results, computed once in NumPy, as KDTR files in datasets/golden.

`python -m reference.golden` writes them, `--check` compares the files with a fresh computation. Integers are the same
on every machine. Float results are computed in float64 and rounded once to their stored type, so that another BLAS or
libm gives them again within 1 ulp; float inputs and weights come from a counter-based generator (inputs.py) whose
arithmetic is exact, so they are the same bits everywhere, in C++ too.
"""
