"""Benchmarks: python -m benchmarks NAME measures this machine and prints one JSON line.

base.py has the interface of a benchmark, and __main__.py the list. accelerator/ measures one
accelerator in a few minutes; sides/ are the peers' programs that `peers` compares with.

Must not import: `tests`.
"""
