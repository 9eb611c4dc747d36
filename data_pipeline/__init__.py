"""Data pipeline: raw text to clusters of documents, on Apache Beam.

Public names:
  build: all stages of a config (python -m data_pipeline.build).

Must not import: `benchmarks`, `configs`, `launch` and `tests`.
"""
