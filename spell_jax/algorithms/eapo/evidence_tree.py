"""Tree of evidence: sample several evidence sets, choose the best, and reason from it.

1. The policy samples k branches of analysis and evidence per question, with EAPO's prompt.
2. The evidence sets are scored: by the similarity of their vectors to the question's ("similarity",
   the paper's SSA), or by a judge that reads all of them together without the documents ("judge",
   LLM-E).
3. The best branch is continued, token by token as it was sampled, with k reasonings and answers,
   which a judge may score too ("judge", LLM-R). The best one's answer is the answer.
4. With "none" a single branch is sampled; "none" twice is the plain structured answer (EAR). If
   scores are equal or scoring failed, the first well-formed branch is chosen.

Source: EAPO, section 2.2; an embedding model takes the place of its reranker.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import app

from spell_jax.evaluation import generation
from spell_jax.evaluation.judge import PolicyJudge
from spell_jax.evaluation.policy_sampler import Policy
from spell_jax.policy.embedder import Embedder
from spell_jax.runtime import distributed, entry
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.config import check_choice, check_least
from spell_jax.sampler.keys import request_keys
from spell_jax.sampler.requests import Options, Sample
from spell_jax.selfplay import evidence, rules
from spell_jax.selfplay.judge import JUDGE_KEY, Ask, Endpoint, JudgeConfig
from spell_jax.selfplay.prompts import Prompts

log = logging.getLogger(__name__)

EVIDENCE_BY = ("none", "similarity", "judge")
REASONING_BY = ("none", "judge")
EVIDENCE_END, ANSWER_END = "</evidence>", "</answer>"
EMBED_TOKENS = 8192  # tokens of a batch of texts to embed

Record = dict[str, Any]
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
    """One continuation that was sampled from a node."""

    tokens: list[int]  # from the start of the answer, without a stop token
    text: str  # up to the closing tag that ended the sample
    sections: tuple[str, ...]  # see evidence.parse_sections; () for a bad format
    logprob: float  # sum over the sampled tokens, in nats
    score: float | None = None  # larger is better; None if it was not scored


@dataclasses.dataclass
class Node:
    """A request with its prompt, and its tree."""

    record: Record
    ids: list[int]  # token ids of the prompt
    key: np.ndarray  # key data of the next samples, uint32 [2]
    branches: list[Branch] = dataclasses.field(default_factory=list)
    chosen: Branch | None = None  # the best of `branches`, if one is well-formed
    reasonings: list[Branch] = dataclasses.field(default_factory=list)
    best: Branch | None = None  # the best of `reasonings`, likewise

    @property
    def question(self) -> str:
        return self.record["question"]


def make_prompt(record: Record, prompts: Prompts) -> str:
    """Prompt of a request; ValueError names a field that is missing or of the wrong type."""
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

    `sampling` has temperature, top_p and max_tokens, as in Options; the cap holds for each of the
    two parts of an answer. `judge` and `embed` are for "judge" and "similarity".
    """

    policy: Policy
    config: TreeConfig
    prompts: Prompts
    sampling: Record
    judge: Ask | None = None
    embed: Embed | None = None

    def answer(self, records: Sequence[Record], texts: Sequence[str], seed: int) -> list[Record]:
        """Output lines of requests with prompts `texts`; one over the context has no branches."""
        chat = self.policy.tokenizer.chat
        key = jax.random.key(seed)
        keys = request_keys(key, len(records))
        nodes = [Node(*one) for one in zip(records, map(chat, texts), keys, strict=True)]
        room = self.policy.config.max_positions - 2 * self.sampling["max_tokens"]
        asked = [node for node in nodes if len(node.ids) <= room]
        if len(asked) < len(nodes):
            refused = len(nodes) - len(asked)
            log.warning("%d prompts are longer than %d tokens and were not asked", refused, room)
        self._find_evidence(asked)
        later = request_keys(jax.random.fold_in(key, 1), len(records))
        for node, other in zip(nodes, later, strict=True):
            node.key = other
        self._reason([(node, node.chosen) for node in asked if node.chosen is not None])
        return [describe(node) for node in nodes]

    def _find_evidence(self, nodes: Sequence[Node]) -> None:
        """Samples branches up to the end of the evidence, and chooses the best per question."""
        width = 1 if self.config.evidence_by == "none" else self.config.width
        for i, samples in self._sample(nodes, [node.ids for node in nodes], width, EVIDENCE_END):
            nodes[i].branches = [self._branch([], sample, EVIDENCE_END, 2) for sample in samples]
        items = [(n.question, formed) for n in nodes if len(formed := _well_formed(n.branches)) > 1]
        if self.config.evidence_by == "similarity":
            self._rank_by_similarity(items)
        elif self.config.evidence_by == "judge":
            ask = self.prompts.evidence_scores
            self._rank_by_judge(
                [(ask(q, [b.sections[1] for b in formed]), formed) for q, formed in items]
            )
        for node in nodes:
            node.chosen = _best(node.branches)

    def _reason(self, pairs: Sequence[tuple[Node, Branch]]) -> None:
        """Samples reasonings after the chosen evidence, and chooses the best per question."""
        width = 1 if self.config.reasoning_by == "none" else self.config.width
        nodes = [node for node, _ in pairs]
        prefixes = [[*node.ids, *chosen.tokens] for node, chosen in pairs]
        for i, samples in self._sample(nodes, prefixes, width, ANSWER_END):
            before = pairs[i][1].tokens
            nodes[i].reasonings = [self._branch(before, s, ANSWER_END, 4) for s in samples]
        if self.config.reasoning_by == "judge":
            ask = self.prompts.reasoning_scores
            self._rank_by_judge(
                [
                    (ask(n.question, chosen.sections[1], [b.sections[2] for b in formed]), formed)
                    for n, chosen in pairs
                    if len(formed := _well_formed(n.reasonings)) > 1
                ]
            )
        for node in nodes:
            node.best = _best(node.reasonings)

    def _sample(
        self, nodes: Sequence[Node], prompts: Sequence[list[int]], width: int, end: str
    ) -> Iterator[tuple[int, list[Sample]]]:
        """Yields (index, `width` samples) in order of completion."""
        options = Options(**self.sampling, stop_strings=(end,))
        ids = [np.array(prompt, np.int32) for prompt in prompts]
        keys = np.array([node.key for node in nodes], np.uint32).reshape(-1, 2)
        return self.policy.sample(ids, width, keys, [options] * len(ids))

    def _branch(self, before: list[int], sample: Sample, end: str, sections: int) -> Branch:
        """A sample after the tokens `before`, parsed into its first `sections` sections."""
        tokens = [*before, *sample.content]
        text = self.policy.tokenizer.decode(tokens)
        if sample.stop_string:
            text = text[: text.rindex(end) + len(end)]
        parsed = evidence.parse_sections(text, sections) or ()
        return Branch(tokens, text, parsed, math.fsum(map(float, sample.logprobs)))

    def _rank_by_similarity(self, items: Sequence[tuple[str, list[Branch]]]) -> None:
        """Sets scores from -1 to 1: cosines between the vectors of question and evidence."""
        assert self.embed is not None
        texts = [text for q, formed in items for text in (q, *(b.sections[1] for b in formed))]
        vectors = iter(self.embed(texts) if texts else ())
        for _, branches in items:
            question = next(vectors)
            for branch in branches:
                branch.score = float(np.dot(question, next(vectors)))

    def _rank_by_judge(self, items: Sequence[tuple[str, list[Branch]]]) -> None:
        """Sets scores from 1 to 5 by (prompt, branches); None for no reply or a malformed one."""
        assert self.judge is not None
        prompts = list(dict.fromkeys(prompt for prompt, _ in items))
        replies = dict(self.judge(prompts)) if prompts else {}
        failed = 0
        for prompt, branches in items:
            scores = evidence.parse_scores(replies.get(prompt) or "", len(branches))
            failed += scores is None
            for branch, score in zip(branches, scores or [None] * len(branches), strict=True):
                branch.score = score
        if failed:
            log.warning("no scores of %d of %d groups of branches", failed, len(items))


def describe(node: Node) -> Record:
    """The request and its tree as a line of the output.

    "prediction" is None if no answer is well-formed; "right" needs the request's true "answer".
    """
    record, task = node.record, _task(node.record)
    documents = evidence.searchable(record["documents"])
    branches = [
        _describe_branch(branch, branch is node.chosen)
        | {"verbatim": evidence.verbatim_share("".join(branch.sections[1:2]), documents)}
        for branch in node.branches
    ]
    prediction, stated = None, ""
    if node.best is not None:
        stated = evidence.with_answer_phrase(node.best.sections[3], task)
        prediction = rules.extract_answer(stated, task)
    result = record | {
        "branches": branches,
        "reasonings": [_describe_branch(one, one is node.best) for one in node.reasonings],
        "prediction": prediction,
    }
    if isinstance(record.get("answer"), str):
        result["right"] = rules.score(stated, record["answer"], task) == 1
    return result


def _describe_branch(branch: Branch, is_chosen: bool) -> Record:
    return {
        "text": branch.text,
        "well_formed": bool(branch.sections),
        "score": branch.score,
        "logprob": branch.logprob,
        "tokens": len(branch.tokens),
        "chosen": is_chosen,
    }


def _well_formed(branches: Sequence[Branch]) -> list[Branch]:
    return [branch for branch in branches if branch.sections]


def _best(branches: Sequence[Branch]) -> Branch | None:
    """The well-formed branch with the highest score; the first one wins a tie."""
    formed = _well_formed(branches)
    return max(formed, key=lambda b: -math.inf if b.score is None else b.score, default=None)


def _task(record: Record) -> str:
    return record.get("task", "general_qa")


# ----------------------------------------------------------- spell_jax.generate, from the flags


def run(given: Any) -> None:
    """Answers the questions of --prompts with trees and writes --out."""
    policy, prompts, sampling = generation.load(given)
    config = TreeConfig(given.width, given.evidence_by, given.reasoning_by)
    judge = _make_judge(given, policy) if "judge" in dataclasses.astuple(config) else None
    embed = _make_embed(given) if config.evidence_by == "similarity" else None
    tree = Tree(policy, config, prompts, sampling, judge, embed)
    requests = generation.read_requests(given.prompts, prompts, make_prompt)
    entry.setup_done()
    generation.write(given, tree.answer(*requests, given.seed))


def _make_judge(given: Any, policy: Policy) -> Ask:
    """The judge of branches: an endpoint, another policy, or `policy` itself by default."""
    if bool(given.judge_url) != bool(given.judge_model) or (given.judge_url and given.judge_policy):
        raise app.UsageError("--judge_url and --judge_model go together, without --judge_policy")
    key, cap = os.environ.get(JUDGE_KEY), given.judge_max_tokens
    if given.judge_url:
        endpoint = Endpoint(JudgeConfig(given.judge_url, given.judge_model, key, max_tokens=cap))
        # One host asks and tells all the others, so that they continue from the same branch.
        return lambda texts: distributed.broadcast(lambda: list(endpoint(texts)))
    if given.judge_policy:
        policy = Policy(given.judge_policy, given.dtype)
    return PolicyJudge(policy, cap)


def _make_embed(given: Any) -> Embed:
    if not given.embedder:
        raise app.UsageError("--embedder: must be a Hugging Face folder, for similarity")
    mesh, most = meshes.make_mesh(), given.embed_max_tokens
    embedder = Embedder(given.embedder, mesh, most, EMBED_TOKENS, given.dtype)
    return lambda texts: embedder.embed([embedder.encode(text)[0] for text in texts])
