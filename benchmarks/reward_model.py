"""Benchmark of EAPO's reward models: their scores of the evidence in a run's answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from etils import epath

from benchmarks.base import BenchmarkCommand
from spell_jax.evaluation.judge import PolicyJudge
from spell_jax.evaluation.policy_sampler import Policy
from spell_jax.runtime.episodes import read_episodes
from spell_jax.selfplay import evidence
from spell_jax.selfplay import prompts as prompt_sets


@dataclasses.dataclass
class RewardModel(BenchmarkCommand):
    """Asks reward models to score the same groups of answers, from a run's episodes, greedily.

    For each model, "by_outcome" is the accuracy among pairs of a right and a wrong answer of a
    group: 1 if the right one has the higher score, .5 if both have the same, which is also the
    accuracy of a guess. "by_evidence" is that among pairs whose evidence differs in F1, where the
    questions' evidence is known. "failed" is the share of malformed replies.
    """

    run_folder: Annotated[str, "workdir of an EAPO run, whose episodes are read"] = ""
    models: Annotated[str, "folders of reward models, separated by commas"] = ""
    first: Annotated[int, "first step whose episodes are read"] = 1
    last: Annotated[int, "last step whose episodes are read"] = 1_000_000
    prompts: Annotated[str, "set of prompts"] = "compact"
    max_tokens: Annotated[int, "maximum tokens of a reply"] = 96

    def run(self) -> dict[str, Any]:
        recorded_episodes = read_episodes(epath.Path(self.run_folder), lambda line: line)
        groups = [
            episode
            for step, episode in recorded_episodes
            if self.first <= step <= self.last and sum(_well_formed(episode)) > 1
        ]
        if not groups:
            raise ValueError(
                f"run_folder = {self.run_folder!r}: has no episode from step {self.first} to "
                f"{self.last} with two well-formed answers"
            )
        measured = {folder: self._measure(folder, groups) for folder in self.models.split(",")}
        return {"groups": len(groups), "measured": measured}

    def _measure(self, folder: str, groups: list[Mapping[str, Any]]) -> dict[str, Any]:
        prompts = prompt_sets.load(self.prompts)
        texts = [prompts.evidence_scores(g["question"], _evidence(g)) for g in groups]
        replies = dict(PolicyJudge(Policy(folder), self.max_tokens)(sorted(set(texts))))
        pairs: dict[str, list[float]] = {"by_outcome": [], "by_evidence": []}
        failed = 0
        for group, text in zip(groups, texts, strict=True):
            scores = evidence.parse_scores(replies[text] or "", sum(_well_formed(group)))
            if scores is None:
                failed += 1
                continue
            pairs["by_outcome"] += evidence.pairs_in_order(
                _of_well_formed(group, group["rule"]), scores
            )
            pairs["by_evidence"] += evidence.pairs_in_order(_f1s(group), scores)
        sizes = {f"pairs_{name}": len(values) for name, values in pairs.items()}
        means = {name: sum(values) / len(values) for name, values in pairs.items() if values}
        return means | sizes | {"failed": failed / len(groups)}


def _well_formed(episode: Mapping[str, Any]) -> list[bool]:
    return episode["measures"]["well_formed"]


def _of_well_formed(episode: Mapping[str, Any], values: Iterable[Any]) -> list[Any]:
    return [value for value, formed in zip(values, _well_formed(episode), strict=True) if formed]


def _evidence(episode: Mapping[str, Any]) -> list[str]:
    parsed = map(evidence.parse_answer, _of_well_formed(episode, episode["answers"]))
    return [answer.evidence for answer in parsed if answer is not None]


def _f1s(episode: Mapping[str, Any]) -> list[float]:
    measures = episode["measures"]
    pairs = zip(measures["evidence_precision"], measures["evidence_recall"], strict=True)
    f1s = [None if p is None else 2 * p * r / ((p + r) or 1.0) for p, r in pairs]
    return [value or 0.0 for value in _of_well_formed(episode, f1s)]
