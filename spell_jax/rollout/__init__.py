"""Rollout: texts to requests, samples to replies, for algorithms, evaluation, judges and teachers.

Public names:
  text_model.TextModel: weights, tokenizer and sampler of a policy; `ask` turns texts into replies.
  replies.Ask, replies.AskModels, replies.Reply: how models are asked, and what a model replies.
  worker.RolloutWorker: runs the coroutines of a step, and samples for them.
  judge.make_judge, judge.Judge: the external model that judges answers.
  repliers.make_replier: a chat endpoint or a policy that replies to single prompts.
  flags.define_flags: flags of the commands that sample a policy and ask a judge.

Must not import: `reporting` and rooms above.
"""
