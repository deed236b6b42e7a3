"""Test and benchmark harness: cases are run, checked for parity, timed, stored as rows, compared and reported.

Every measurement is one `harness.records.Row`; compare and report are pure functions of rows. Importing any module of
this package starts no process and touches no GPU.
"""
