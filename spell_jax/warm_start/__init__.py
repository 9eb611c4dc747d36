"""Warm start: rows of supervised tuning that teach a small policy the form of each role.

Public names:
  demonstrations.Row: a prompt and its completion.
  demonstrations.world_demonstrations, demonstrations.story_demonstrations: rows of generated
    worlds.
  question_rows, folder_rows, evidence_rows, reconstruction_rows, ladder_rows: rows from questions,
    folders of texts, evidence, order of paragraphs, and the ladder's world; commands but the last.

Must not import: `algorithms` and rooms above.
"""
