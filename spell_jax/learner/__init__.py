"""Learner: groups of answers with advantages to one update of the policy.

Public names:
  packing.TrainGroup: a prompt, its answers and their advantages.
  packing.MicroBatch, packing.pack: groups as rows of tokens, in which shared prompts stand once.
  advantages.group_advantages: rewards of a group to advantages.
  loss_config.LossConfig, loss.policy_loss: the loss and its switches.
  optimizer.OptimizerConfig: the optimizer and its schedule.
  learner.Learner, learner.Update: scores of groups, and an update as a series of device calls.
  in_jit.score_replies, in_jit.masked_advantages: for a jitted program of the caller.

Must not import: `sampler`, which stands beside it, `selfplay` and rooms above.
"""
