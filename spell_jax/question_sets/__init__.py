"""Question sets: questions with known answers, and rows of supervised tuning from them.

Public names:
  published: questions of published rows; padded: long questions, padded with distractors.
  articles, cloze: questions that people asked, and sentences with gaps.
  teacher: questions that a teacher model writes, with agreement as filter.
  long_documents: documents by domain and length.
  rows.make_rows, rows.Row, rows.seeded_rows: rows of all roles from questions; a prompt with its
    completion; a stream of rows.
  tuning_rows.open_rows, tuning_rows.MakeRows, tuning_rows.to_group: the rows of supervised tuning.
  tiny_world_rows.world_demonstrations, tiny_world_rows.story_demonstrations: rows of generated
    worlds.
  facts, evidence_rows, reconstruction_rows: questions and rows from folders of texts, evidence, and
    the order of paragraphs.

Must not import: `algorithms` and rooms above.
"""
