"""Data: documents, clusters of documents, questions, and the order in which a run meets them.

Public names:
  clusters.Cluster, clusters.ClusterSource: documents that belong together, and a set of clusters.
  questions.Question, questions.read_questions: questions with their documents and references.
  samples.Sample: one answer as tokens, with what the sampler recorded.
  config.DataConfig, config.open_clusters: the config's section `data`, and its clusters.
  tfds_sets.TfdsSource, tfds_sets.TextSet: texts of prepared tensorflow-datasets sets.
  stream.TaskStream: clusters and tasks by step, the same for every resumed run.
  row_files.read: rows of JSON, JSON lines, CSV and parquet.
  tiny_world, tiny_stories: generated worlds with known answers.

Must not import: `attention` and rooms above.
"""
