"""Data pipeline: raw text to clusters of documents, on Apache Beam.

Public names:
  build: all stages of a config (python -m data_pipeline.build).
  article_questions, cloze_questions, long_questions: questions from published rows or by rules.
  long_documents: the longest documents of each domain.

Must not import: `benchmarks`, `configs`, `launch` and `tests`.
"""
