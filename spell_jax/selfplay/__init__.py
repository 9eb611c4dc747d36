"""Self-play in text and numbers: prompts, parsing, rules and rewards, without arrays.

Every function that reads text accepts any text, in bounded time, and runs nothing in the text.

Public names:
  prompts.load, prompts.Prompts: the templates of a folder, and the prompts of all roles.
  parsing.parse_question, parsing.parse_verdict: what a model wrote to fields.
  rules.extract_answer, rules.score: the answer in a text, and whether it is right.
  rewards.questioner_reward, rewards.verifier_rewards, rewards.combine: rewards of the three roles.
  memory.QuestionMemory: questions of a cluster that were solved, for the next prompt.
  selection.split_groups, selection.verifier_groups: which answers are trained on.
  evidence, puzzles, cloze: the same for quotes, order of paragraphs, and sentences with a gap.
  verdicts.JUDGE_TEMPLATES: prompts of an external judge, and parsers of its replies.

Must not import: `rollout` and rooms above.
"""
