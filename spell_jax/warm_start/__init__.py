"""Warm start: rows of supervised tuning that teach a small policy the form of each role.

Public names:
  demonstrations.Row: a prompt and its completion.
  demonstrations.world_demonstrations, demonstrations.story_demonstrations: rows of generated
    worlds.
  question_rows, folder_rows, evidence_rows, reconstruction_rows: commands that make rows from
    questions, folders of texts, evidence, and the order of paragraphs.

Must not import: `algorithms` and rooms above.
"""
