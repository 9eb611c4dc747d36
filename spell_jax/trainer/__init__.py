"""Trainer: from a config to a run; its loop, its states, and what it saves.

Public names:
  loop.train: self-play or any other registered algorithm, from a config to saved policies.
  supervised.fine_tune: supervised tuning on rows.
  build.make_run, build.Run: models, data and algorithm of a config.
  rollouts.Rollouts: the rollout of each step, in turn with the updates or beside them.
  state.States: weights and optimizers of a run's models after a step.
  config_help.describe: the fields of a config, with values, defaults and meanings.
  export.export: the policy of a checkpoint as a folder in Hugging Face's layout.

Must not import: entry points.
"""
