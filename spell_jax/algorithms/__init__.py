"""Algorithms: documents to episodes with rewards, and episodes to training groups.

An algorithm asks models through coroutines, and knows no sampler, mesh or optimizer.

Public names:
  base.Algorithm, base.AlgorithmContext: what every algorithm implements and receives.
  episode.QuestionEpisode, episode.responder_groups: an episode and GRPO groups to start from.
  registry.register, registry.AlgorithmSpec: how a file of the user's adds an algorithm.
  registry.ALGORITHMS, registry.read_algorithm: algorithms by name, with their configs.
  config.AlgorithmConfig: fields of all algorithms.
  own_reward.RewardInput: one answer, as the user's reward function reads it.
  held_out.Evaluation, held_out.HeldOut: what a held-out evaluation implements, and its one class.

Must not import: `trainer`, the module config.py above it, and entry points.
"""
