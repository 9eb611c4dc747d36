"""Samples answers of a trained policy in any of its roles.

    python -m spell_jax.generate --policy=FOLDER --prompt="TEXT"
    python -m spell_jax.generate --workdir=DIR --prompts=FILE.jsonl --out=FILE.jsonl

The first form prints the answers to one prompt, --samples of them. In the second form:

1. A line of the input is a JSON object with the fields of its role:
   {"role": "questioner", "task", "documents"}, with "letter" for multiple choice and optionally
   "history" (a list of {"question", "answer"}, oldest first); {"role": "responder", "task",
   "documents", "question"}; {"role": "verifier", "question", "answer", "reference"}; or
   {"prompt": "..."}, used unchanged. "id" and "note" are copied to the output. Bad lines, and lines
   with other fields, are counted, logged with their place and skipped.
2. The policy is DIR/policy or --policy. DIR/config.json decides the wording of the
   prompts and how answers are read, unless --prompt_set and --extract do. Every input may be a URL.
3. A line of the output is the input's plus, with an entry per answer, "answers" (texts; none if the
   prompt is too long for the policy's context), "logprobs" (sums over an answer's tokens, in nats,
   at the sampling temperature), "tokens" (counts) and "stopped" (false: truncated at --max_tokens).
   A questioner also has "parsed", a responder "predictions" (extracted answers) and a verifier
   "verdicts" (1 yes, 0 no, -1 malformed).

With --mode=evidence_tree a line holds {"documents", "question"}, "task" if it is not general_qa,
and "answer" and "evidence" (a list) if they are known. The policy samples --width sets of evidence,
--evidence_by selects one, and the policy reasons from it (algorithms/eapo/evidence_tree.py).
"judge" is the policy itself, another one (--judge_policy) or a chat endpoint (--judge_url,
--judge_model, key in $SPELL_JUDGE_KEY), "oracle" the known evidence. A line of the output has the
whole tree ("branches", "reasonings"), "prediction" and "stated" (the answer as the rule and a judge
read it), "right" (by the rule) if the answer is known, and "best_chosen" if the evidence is. With
--every_branch it also has "paths", an answer from each well-formed set of evidence.
spell_jax.evaluate --judgment has a judge read such a file.
"""

from __future__ import annotations

from absl import flags

from spell_jax.policy.choices import DTYPES, THINKING
from spell_jax.runtime import entry
from spell_jax.selfplay.evidence import EVIDENCE_BY, REASONING_BY
from spell_jax.selfplay.rules import EXTRACTS


def main(_) -> None:
    # Imported here, so that --help and a mistake in a flag are answered at once.
    from spell_jax.algorithms.eapo import evidence_tree
    from spell_jax.evaluation import generation
    from spell_jax.runtime import setup

    flag_values = flags.FLAGS
    generation.check_flags(flag_values)
    setup.setup()
    if flag_values.prompt is not None:
        generation.answer_prompt(flag_values)
    elif flag_values.mode == "evidence_tree":
        evidence_tree.run(flag_values)
    else:
        generation.answer_requests(flag_values)


if __name__ == "__main__":
    # Defined here, so that one process may import several entry points.
    flags.DEFINE_string("workdir", None, "Folder of a run; its policy/ answers.")
    flags.DEFINE_string("policy", None, "Folder of a policy, instead of the run's.")
    flags.DEFINE_string("prompt", None, "A prompt, whose answers are printed.")
    flags.DEFINE_string("prompts", None, "JSONL of requests, instead of --prompt.")
    flags.DEFINE_string("out", None, "JSONL to write, with --prompts.")
    flags.DEFINE_integer("samples", 1, "Answers to each request.", lower_bound=1)
    flags.DEFINE_float("temperature", 0.7, "Sampling temperature; 0: greedy.")
    flags.DEFINE_float("top_p", 0.95, "Probability mass of the nucleus.")
    flags.DEFINE_bool("greedy", False, "The most likely token each time.")
    flags.DEFINE_integer("max_tokens", 256, "Maximum answer length in tokens.")
    flags.DEFINE_string("prompt_set", None, "compact, full or a folder of templates.")
    flags.DEFINE_enum("extract", None, EXTRACTS, "How answers are read; without a run: lenient.")
    flags.DEFINE_integer("seed", 0, "Seed of sampling.")
    flags.DEFINE_enum("dtype", "float32", list(DTYPES), "Dtype of the policy's weights.")
    flags.DEFINE_enum(
        "thinking", "", list(THINKING), "Thinking mode of chat templates that have one."
    )
    flags.DEFINE_enum(
        "mode", "roles", ["roles", "evidence_tree"], "Roles of self-play, or trees of evidence."
    )
    flags.DEFINE_integer("width", 3, "Sets of evidence, or reasonings, to select from.")
    flags.DEFINE_enum("evidence_by", "judge", EVIDENCE_BY, "Selector of the evidence.")
    flags.DEFINE_enum("reasoning_by", "none", REASONING_BY, "Selector of the reasoning.")
    flags.DEFINE_bool(
        "every_branch", False, "Whether all sets of evidence are continued, to compare reasonings."
    )
    flags.DEFINE_string("judge_url", "", "Chat-completions URL of an external judge.")
    flags.DEFINE_string("judge_model", "", "Name of the judge's model at --judge_url.")
    flags.DEFINE_string("judge_policy", "", "Folder of a policy, for the judge.")
    flags.DEFINE_integer("judge_max_tokens", 1024, "Maximum length of a judge's reply.")
    flags.DEFINE_string("reranker", "", "Folder of a causal reranker, such as Qwen3-Reranker.")
    flags.DEFINE_enum("reranker_thinking", "off", list(THINKING), "As --thinking, of the reranker.")
    flags.DEFINE_string("embedder", "", "Folder of an embedding model, for similarity.")
    flags.DEFINE_integer("embed_max_tokens", 1024, "Maximum length of a text to embed.")
    entry.run_main(main)
