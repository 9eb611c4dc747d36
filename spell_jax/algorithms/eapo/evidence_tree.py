"""Tree of evidence: sample several evidence sets, choose the best, and reason from it.

1. Each question gets EAPO's prompt. The policy samples k branches of analysis and evidence, each
   ended at the tag that closes the evidence.
2. The evidence sets are scored: by the similarity of their vectors to the question's ("similarity",
   the paper's SSA), or by a judge that reads all of them together without the documents ("judge",
   LLM-E).
3. The best branch is continued, token by token as it was sampled, with k reasonings and answers,
   which a judge may score too ("judge", LLM-R). The best one's answer is the answer.
4. With "none" a single branch is sampled; "none" twice is the plain structured answer (EAR). If
   scores are equal or scoring failed, the first well-formed branch is chosen.

All questions go through a part before the next part starts. Source: EAPO, section 2.2; an embedding
model takes the place of its reranker.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from spell_jax.evaluation.policy_sampler import Policy
from spell_jax.runtime.config import check_choice, check_least
from spell_jax.sampler.requests import Options, Sample
from spell_jax.sampler.session import request_keys
from spell_jax.selfplay import evidence, rules
from spell_jax.selfplay.judge import Ask
from spell_jax.selfplay.prompts import Prompts

log = logging.getLogger(__name__)

EVIDENCE_BY = ("none", "similarity", "judge")
REASONING_BY = ("none", "judge")
EVIDENCE_END, ANSWER_END = "</evidence>", "</answer>"

Record = dict[str, Any]
Scores = Sequence[float] | None
# Texts [B] -> vectors float32 [B, D] of length 1.
Embed = Callable[[Sequence[str]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class TreeConfig:
    """Shape of the tree. Invalid values raise ValueError.

    Attributes:
      width: k, number of branches to choose from [paper: 3].
      evidence_by: how the evidence is chosen, one of EVIDENCE_BY.
      reasoning_by: how the reasoning is chosen, one of REASONING_BY.
    """

    width: int = 3
    evidence_by: str = "judge"
    reasoning_by: str = "none"

    def __post_init__(self):
        check_least(self, "", width=1)
        check_choice(self, "", evidence_by=EVIDENCE_BY, reasoning_by=REASONING_BY)


@dataclasses.dataclass
class Branch:
    """One continuation that was sampled from a node.

    Attributes:
      tokens: token ids from the start of the answer, without a stop token.
      text: decoded text, up to the closing tag that ended the sample.
      sections: sections of the text, as of evidence.parse_sections; None for a bad format.
      logprob: sum over the sampled tokens, in nats.
      score: score, larger is better; None if it was not scored.
    """

    tokens: list[int]
    text: str
    sections: tuple[str, ...] | None
    logprob: float
    score: float | None = None


@dataclasses.dataclass
class _Node:
    """A question with its prompt, and its tree.

    Attributes:
      record: the request.
      ids: token ids of the prompt.
      key: key data of the next samples, uint32 [2].
      branches: sampled evidence.
      chosen: best branch, or None if none is well-formed.
      reasonings: sampled reasonings and answers after the best branch.
      best: best reasoning, or None if none is well-formed.
    """

    record: Record
    ids: list[int]
    key: np.ndarray
    branches: list[Branch] = dataclasses.field(default_factory=list)
    chosen: Branch | None = None
    reasonings: list[Branch] = dataclasses.field(default_factory=list)
    best: Branch | None = None


def make_prompt(record: Record, prompts: Prompts) -> str:
    """Text of one request's prompt; "task" is general_qa if it is not given.

    Raises:
      ValueError: if a field is missing, unknown or of the wrong type; naming the field.
    """
    documents, question = record.get("documents"), record.get("question")
    if not isinstance(documents, list) or not all(isinstance(text, str) for text in documents):
        raise ValueError(f"documents = {documents!r}: must be a list of texts")
    if not isinstance(question, str) or not question:
        raise ValueError(f"question = {question!r}: must be a text")
    rules.check_task(_task(record))
    return prompts.evidence(documents, question)


@dataclasses.dataclass
class Tree:
    """Answers questions with trees of evidence.

    Attributes:
      policy: policy that answers.
      config: shape of the tree.
      prompts: the prompt set.
      sampling: temperature, top_p and max_tokens, as in Options. The cap holds for each of the two
        parts of an answer.
      judge: judge for "judge".
      embed: embedding function for "similarity".
    """

    policy: Policy
    config: TreeConfig
    prompts: Prompts
    sampling: Record
    judge: Ask | None = None
    embed: Embed | None = None

    def __post_init__(self):
        by = self.config.evidence_by, self.config.reasoning_by
        if "judge" in by and self.judge is None:
            raise ValueError(f"evidence_by, reasoning_by = {by}: need a judge")
        if "similarity" in by and self.embed is None:
            raise ValueError(f"evidence_by = {by[0]!r}: needs an embedding model")

    def answer(self, records: Sequence[Record], texts: Sequence[str], seed: int) -> list[Record]:
        """Answers requests.

        Args:
          records: the requests.
          texts: their prompts (make_prompt).
          seed: seed of the samples.

        Returns:
          A line of the output per request (`describe`). A request that is too long for the policy's
          context has no branches.
        """
        chat = self.policy.tokenizer.chat
        key = jax.random.key(seed)
        keys = request_keys(key, len(records))
        nodes = [_Node(*one) for one in zip(records, map(chat, texts), keys, strict=True)]
        room = self.policy.config.max_positions - 2 * self.sampling["max_tokens"]
        asked = [node for node in nodes if len(node.ids) <= room]
        if len(asked) < len(nodes):
            refused = len(nodes) - len(asked)
            log.warning("%d prompts are longer than %d tokens and were not asked", refused, room)
        self._find_evidence(asked)
        found = [node for node in asked if node.chosen is not None]
        later = request_keys(jax.random.fold_in(key, 1), len(records))
        for node, other in zip(nodes, later, strict=True):
            node.key = other
        self._reason(found)
        return [
            describe(node.record, node.branches, node.chosen, node.reasonings, node.best)
            for node in nodes
        ]

    def _find_evidence(self, nodes: Sequence[_Node]) -> None:
        """Samples branches up to the end of the evidence, and chooses the best per question."""
        width = 1 if self.config.evidence_by == "none" else self.config.width
        for node, samples in self._sample(nodes, [node.ids for node in nodes], width, EVIDENCE_END):
            node.branches = [self._branch([], sample, EVIDENCE_END, 2) for sample in samples]
        items = [(node, formed) for node in nodes if len(formed := _formed(node.branches)) > 1]
        if self.config.evidence_by == "similarity":
            self._rank_by_similarity(items)
        elif self.config.evidence_by == "judge":
            prompts = [
                self.prompts.evidence_scores(_question(n), _sections(b, 1)) for n, b in items
            ]
            self._rank_by_judge([branches for _, branches in items], prompts)
        for node in nodes:
            node.chosen = _best(node.branches)

    def _reason(self, nodes: Sequence[_Node]) -> None:
        """Samples reasonings after the chosen evidence, and chooses the best per question."""
        width = 1 if self.config.reasoning_by == "none" else self.config.width
        prefixes = [[*node.ids, *_chosen(node).tokens] for node in nodes]
        for node, samples in self._sample(nodes, prefixes, width, ANSWER_END):
            before = _chosen(node).tokens
            node.reasonings = [self._branch(before, one, ANSWER_END, 4) for one in samples]
        if self.config.reasoning_by == "judge":
            items = [(n, formed) for n in nodes if len(formed := _formed(n.reasonings)) > 1]
            prompts = [
                self.prompts.reasoning_scores(
                    _question(n), _sections([_chosen(n)], 1)[0], _sections(formed, 2)
                )
                for n, formed in items
            ]
            self._rank_by_judge([formed for _, formed in items], prompts)
        for node in nodes:
            node.best = _best(node.reasonings)

    def _sample(
        self, nodes: Sequence[_Node], prompts: Sequence[list[int]], width: int, end: str
    ) -> list[tuple[_Node, list[Sample]]]:
        """Samples `width` continuations per prompt; (node, samples) in order of completion."""
        options = Options(**self.sampling, stop_strings=(end,))
        ids = [np.array(prompt, np.int32) for prompt in prompts]
        keys = np.array([node.key for node in nodes], np.uint32).reshape(-1, 2)
        sampled = self.policy.sample(ids, width, keys, [options] * len(ids))
        return [(nodes[place], samples) for place, samples in sampled]

    def _branch(self, before: list[int], sample: Sample, end: str, sections: int) -> Branch:
        """A sample after the tokens `before`, parsed into its first `sections` sections."""
        text = self.policy.tokenizer.decode([*before, *sample.content])
        if sample.stop_string:
            text = text[: text.rindex(end) + len(end)]
        logprob = math.fsum(map(float, sample.logprobs))
        parsed = evidence.parse_sections(text, sections)
        return Branch([*before, *sample.content], text, parsed, logprob)

    def _rank_by_similarity(self, items: Sequence[tuple[_Node, list[Branch]]]) -> None:
        """Sets scores from -1 to 1: cosines between the vectors of question and evidence."""
        assert self.embed is not None
        if not items:
            return
        texts = [t for n, formed in items for t in (_question(n), *_sections(formed, 1))]
        vectors = iter(self.embed(texts))
        for _, formed in items:
            question = next(vectors)
            for branch in formed:
                branch.score = float(np.dot(question, next(vectors)))

    def _rank_by_judge(self, groups: Sequence[list[Branch]], prompts: Sequence[str]) -> None:
        """Sets scores from 1 to 5; None if the judge gives no reply or a malformed one."""
        assert self.judge is not None
        replies = dict(self.judge(list(dict.fromkeys(prompts)))) if prompts else {}
        failed = 0
        for formed, prompt in zip(groups, prompts, strict=True):
            scores = evidence.parse_scores(replies.get(prompt) or "", len(formed))
            failed += scores is None
            for branch, score in zip(formed, scores or [None] * len(formed), strict=True):
                branch.score = score
        if failed:
            log.warning("no scores of %d of %d groups of branches", failed, len(groups))


def describe(
    record: Record,
    branches: Sequence[Branch],
    chosen: Branch | None,
    reasonings: Sequence[Branch],
    best: Branch | None,
) -> Record:
    """A line of the output: the request and its tree.

    "prediction" is the answer, or None if there is no well-formed one. "right" is added if the
    request has the true "answer".
    """
    documents = evidence.searchable(record["documents"])
    found = [
        _described(branch, branch is chosen)
        | {"verbatim": evidence.verbatim_share(_sections([branch], 1)[0], documents)}
        for branch in branches
    ]
    task, prediction, said = _task(record), None, ""
    if best is not None and best.sections:
        said = evidence.with_answer_phrase(best.sections[3], task)
        prediction = rules.extract_answer(said, task)
    result = record | {
        "branches": found,
        "reasonings": [_described(branch, branch is best) for branch in reasonings],
        "prediction": prediction,
    }
    if isinstance(record.get("answer"), str):
        result["right"] = rules.score(said, record["answer"], task) == 1
    return result


def _described(branch: Branch, is_chosen: bool) -> Record:
    return {
        "text": branch.text,
        "well_formed": branch.sections is not None,
        "score": branch.score,
        "logprob": branch.logprob,
        "tokens": len(branch.tokens),
        "chosen": is_chosen,
    }


def _formed(branches: Sequence[Branch]) -> list[Branch]:
    return [branch for branch in branches if branch.sections is not None]


def _best(branches: Sequence[Branch]) -> Branch | None:
    """The well-formed branch with the highest score; the first one wins a tie."""
    formed = _formed(branches)
    return max(formed, key=lambda b: -math.inf if b.score is None else b.score, default=None)


def _sections(branches: Sequence[Branch], place: int) -> list[str]:
    """One section of each branch; "" for a bad format."""
    return [branch.sections[place] if branch.sections else "" for branch in branches]


def _chosen(node: _Node) -> Branch:
    assert node.chosen is not None
    return node.chosen


def _question(node: _Node) -> str:
    return node.record["question"]


def _task(record: Record) -> str:
    return record.get("task", "general_qa")
