"""Benchmark of equality: greedy answers to long prompts, here and by transformers' generate."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Annotated, Any

from benchmarks.base import BenchmarkCommand
from spell_jax.evaluation import answering
from spell_jax.evaluation.answering import EvaluationSampling, Row, TokenizedQuestion
from spell_jax.evaluation.benchmarks import registry
from spell_jax.evaluation.policy_sampler import Policy

_TASKS = "needle,ruler_vt,ruler_cwe,ruler_niah_single_1"


@dataclasses.dataclass
class Agreement(BenchmarkCommand):
    """Answers generated benchmarks greedily, with our sampler and with transformers (extra "test").

    Both read the same folder in float32. "equal_predictions" counts questions whose extracted
    predictions are equal, "equal_texts" those whose whole answers are. "..._accuracy" is the mean
    score by the benchmark's rule.
    """

    policy: Annotated[str, "folder of a policy, or smollm2"] = "smollm2"
    data: Annotated[str, "folder of the texts that hide needles; empty: a novel"] = ""
    tasks: Annotated[str, "generated benchmarks, separated by commas"] = _TASKS
    lengths: Annotated[str, "prompt lengths in tokens (ruler_cwe: 3141 or more)"] = "4096,8000"
    items: Annotated[int, "questions of each benchmark and length"] = 4

    def run(self) -> dict[str, Any]:
        policy = Policy(self.policy)
        lengths = [int(length) for length in self.lengths.split(",")]
        benchmarks = [
            registry.load(f"{task}_{length}", "", self.items, policy.tokenizer, prose=self.data)
            for length in lengths
            for task in self.tasks.split(",")
        ]
        questions = answering.tokenize(policy, benchmarks, max(lengths))
        began = time.perf_counter()
        ours = _sample(policy, questions, max(lengths))
        sampled = time.perf_counter()
        theirs = _generate(policy, questions)
        seconds = {"s": sampled - began, "transformers_s": time.perf_counter() - sampled}
        for rows in (ours, theirs):
            answering.score(list(zip(questions, rows, strict=True)))
        pairs = list(zip(ours, theirs, strict=True))
        return seconds | {
            "questions": len(questions),
            "prompt_tokens": sum(len(question.ids) for question in questions),
            "equal_predictions": sum(a["prediction"] == b["prediction"] for a, b in pairs),
            "equal_texts": sum(a["text"] == b["text"] for a, b in pairs),
            "accuracy": sum(row["rule"] for row in ours) / len(questions),
            "transformers_accuracy": sum(row["rule"] for row in theirs) / len(questions),
        }


def _sample(policy: Policy, questions: Sequence[TokenizedQuestion], limit: int) -> list[Row]:
    sampling = EvaluationSampling(samples=1, temperature=0.0)
    answers = dict(answering.sample_answers(sampling, policy, questions, limit, set()))
    policy.release()
    return [answers[question.key(limit)][0] for question in questions]


def _generate(policy: Policy, questions: Sequence[TokenizedQuestion]) -> list[Row]:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(str(policy.folder), dtype=torch.float32)
    rows = []
    for question in questions:
        ids = torch.tensor(question.ids[None].tolist())
        sequences = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=question.benchmark.max_tokens,
            do_sample=False,
            eos_token_id=list(policy.tokenizer.stop_ids),
            pad_token_id=0,
        )
        tokens = [int(token) for token in sequences[0, ids.shape[1] :]]
        if tokens[-1] in policy.tokenizer.stop_ids:
            tokens.pop()
        rows.append({"text": policy.tokenizer.decode(tokens)})
    return rows
