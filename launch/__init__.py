"""Launch: commands beside a run, which check, plan, compile and start it.

Public names:
  check: every mistake in a config, and the memory that the run needs (python -m launch.check).
  plan: memory on each chip of a slice (python -m launch.plan).
  aot: programs compiled for a TPU slice that is not there (python -m launch.aot).
  tpu_vm, xmanager: rented slices, and sweeps (python -m launch.tpu_vm, launch.xmanager).
  experiments: the papers' tables (python -m launch.experiments), and finished studies.

Must not import: `benchmarks`, `configs` and `tests`.
"""
