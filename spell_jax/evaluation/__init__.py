"""Evaluation: benchmarks of long documents, asked of a policy and scored.

Public names:
  runner.evaluate, runner.EvaluationConfig: benchmarks of a policy, from prompts to a table.
  benchmarks.registry.load: the questions of a benchmark by its name.
  protocol.estimate_best, protocol.summarize: means with intervals, and summaries of benchmarks.
  harness.evaluate: tasks of lm-evaluation-harness.
  judgments.judge_answers: a judge's verdicts on answers that are on disk.
  lengths.measure: lengths of the benchmarks' prompts.

Must not import: `question_sets`, `algorithms` and rooms above.
"""
