"""Rollout: texts to requests, samples to replies, for algorithms, evaluation, judges and teachers.

Public names:
  text_model.Policy: weights, tokenizer and sampler of a policy that answers texts.
  replies.Ask, replies.AskModels, replies.Reply: how models are asked, and what a model replies.
  worker.RolloutWorker: runs the coroutines of a step, and samples for them.
  judge.make_judge, judge.Judge: the external model that judges answers.
  flags.define_flags: flags of the commands that sample a policy and ask a judge.

Must not import: `reporting` and rooms above.
"""
