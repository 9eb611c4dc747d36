"""Measurement of everything on one accelerator in a few minutes: python -m benchmarks accelerator.

1. command.py runs one section after the other, each in a process of its own (child.py) that has a
   time limit. A section that crashes, hangs or runs out of memory costs only its own case.
2. A section (peaks.py, kernels_right.py, ...) is a module with `cases(setting)`, a list of named
   measurements (section.py). Each case's numbers are one JSON line in DIR/results.jsonl, written as
   soon as the case has ended (results.py).
3. A second run in the same folder plays only the cases without numbers.

Nothing here is imported by another room.
"""
