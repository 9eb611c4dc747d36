"""Tree of evidence: sample several evidence sets, choose the best, and reason from it.

1. The policy samples k branches of analysis and evidence per question, with EAPO's prompt.
2. The evidence sets are scored: by a reranker ("reranker", the paper's SSA), by the similarity of
   their vectors to the question's ("similarity"), by a judge that reads all sets together
   without the documents ("judge", LLM-E), or by the known evidence ("oracle", our upper bound).
3. The best branch is continued, token by token as it was sampled, with k reasonings and answers,
   which a judge may score too ("judge", LLM-R). The best one's answer is the answer.
4. With "none" a single branch is sampled; "none" twice is the plain structured answer (EAR). If
   scores are equal or scoring failed, the first well-formed branch is chosen.

Source: EAPO, section 2.2. Where the request has its "evidence", "best_chosen" tells whether the
evidence with the highest ROUGE-L recall has the highest score (EAPO's Figure 7, with width 6).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import app

from spell_jax.data.samples import Sample
from spell_jax.evaluation import generation
from spell_jax.policy import choices
from spell_jax.policy.embedder import Embedder
from spell_jax.rollout import flags
from spell_jax.rollout.repliers import PolicyReplier, make_replier
from spell_jax.rollout.replies import Prompt
from spell_jax.rollout.text_model import TextModel
from spell_jax.runtime import entry
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.config import check_choice, check_least
from spell_jax.runtime.hosts import distributed
from spell_jax.sampler.keys import request_keys
from spell_jax.sampler.requests import Options
from spell_jax.selfplay import evidence, rules
from spell_jax.selfplay.prompts import Prompts
from spell_jax.selfplay.rouge import rouge_l_recall

log = logging.getLogger(__name__)

EVIDENCE_END, ANSWER_END = "</evidence>", "</answer>"
EMBED_TOKENS = 8192  # tokens of a batch of texts to embed

Record = dict[str, Any]
# Texts [B] -> vectors float32 [B, D] of length 1.
Embed = Callable[[Sequence[str]], np.ndarray]
# Prompts [B] -> scores from 0 to 1; None where there is none.
Rerank = Callable[[Sequence[str]], Sequence[float | None]]
# Prompts -> (index of a prompt, reply) in order of arrival; a reply of None is a failure.
AskJudge = Callable[[Sequence[str]], Iterable[tuple[int, str | None]]]


@dataclasses.dataclass(frozen=True)
class TreeConfig:
    """Shape of the tree. Invalid values raise ValueError.

    Attributes:
      width: k, number of branches to choose from [paper: 3].
      evidence_by: how the evidence is chosen, one of evidence.EVIDENCE_BY.
      reasoning_by: how the reasoning is chosen, one of evidence.REASONING_BY.
      every_branch: whether all sets of evidence are continued. The paths are for comparisons of
        their reasonings (EAPO's Table 2); the answer does not depend on them.
    """

    width: int = 3
    evidence_by: str = "judge"
    reasoning_by: str = "none"
    every_branch: bool = False

    def __post_init__(self):
        check_least(self, "", width=1)
        check_choice(self, "", evidence_by=evidence.EVIDENCE_BY, reasoning_by=evidence.REASONING_BY)
        if self.every_branch and (self.evidence_by == "none" or self.width == 1):
            raise ValueError(
                f"every_branch = True: needs several sets of evidence; evidence_by = "
                f"{self.evidence_by!r} with width = {self.width} samples one"
            )


@dataclasses.dataclass
class Branch:
    """One continuation that was sampled from a node."""

    tokens: list[int]  # from the start of the answer, without a stop token
    text: str  # up to the closing tag that ended the sample
    sections: tuple[str, ...]  # see evidence.parse_sections; () for a bad format
    logprob: float  # sum over the sampled tokens, in nats
    rouge_l: float | None = None  # ROUGE-L recall of the known evidence; None without it
    score: float | None = None  # larger is better; None if it was not scored
    is_preferred: bool = False  # whether the judge names it the best, which decides a tie


@dataclasses.dataclass
class Node:
    """A request with its prompt, and its tree."""

    record: Record
    prompt: Prompt
    key: np.ndarray  # key data of the next samples, uint32 [2]
    branches: list[Branch] = dataclasses.field(default_factory=list)
    chosen_branch: Branch | None = None  # the best of `branches`, if one is well-formed
    reasonings: list[Branch] = dataclasses.field(default_factory=list)
    best: Branch | None = None  # the best of `reasonings`, likewise
    paths: list[Branch] = dataclasses.field(default_factory=list)  # see TreeConfig.every_branch

    @property
    def question(self) -> str:
        return self.record["question"]

    @property
    def known_evidence(self) -> list[str]:
        return self.record.get("evidence", [])


def make_prompt(record: Record, prompts: Prompts, needs_evidence: bool = False) -> str:
    """Return the prompt of a request; ValueError names a field that is missing or of a wrong type.

    `needs_evidence` makes the field "evidence", the known evidence, required.
    """
    documents, question = _texts(record, "documents"), record.get("question")
    known_evidence, _ = (_texts({name: []} | record, name) for name in ("evidence", "answers"))
    if needs_evidence and not known_evidence:
        raise ValueError("evidence = []: must be the known evidence, for evidence_by=oracle")
    if not isinstance(question, str) or not question:
        raise ValueError(f"question = {question!r}: must be a text")
    rules.check_task(_task(record))
    return prompts.evidence(documents, question)


def _texts(record: Record, name: str) -> list[str]:
    value = record.get(name)
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"{name} = {value!r}: must be a list of texts")
    return value


@dataclasses.dataclass
class EvidenceTree:
    """Answers questions with trees of evidence.

    `sampling` has temperature, top_p and max_tokens, as in Options; the cap holds for each of the
    two parts of an answer. `judge`, `embed` and `rerank` are for "judge", "similarity" and
    "reranker".
    """

    policy: TextModel
    config: TreeConfig
    prompts: Prompts
    sampling: Record
    judge: AskJudge | None = None
    embed: Embed | None = None
    rerank: Rerank | None = None

    def answer(self, records: Sequence[Record], texts: Sequence[str], seed: int) -> list[Record]:
        """Return output lines of requests; prompts (`texts`) over the context get no branches."""
        key = jax.random.key(seed)
        keys = request_keys(key, len(records))
        nodes = [
            Node(record, self.policy.encode(text), node_key)
            for record, text, node_key in zip(records, texts, keys, strict=True)
        ]
        # An answer has two parts, before and after the choice of a branch, each of at most
        # max_tokens.
        room = self.policy.room(2 * self.sampling["max_tokens"])
        fitting_nodes = [node for node in nodes if len(node.prompt.ids) <= room]
        if len(fitting_nodes) < len(nodes):
            refused = len(nodes) - len(fitting_nodes)
            log.warning("%d prompts are longer than %d tokens and were not asked", refused, room)
        self._find_evidence(fitting_nodes)
        # Keys count all requests, also refused ones: a refusal does not change another answer.
        later_keys = request_keys(jax.random.fold_in(key, 1), len(records))
        for node, later_key in zip(nodes, later_keys, strict=True):
            node.key = later_key
        self._reason(
            [(node, node.chosen_branch) for node in fitting_nodes if node.chosen_branch is not None]
        )
        if self.config.every_branch:
            path_key = jax.random.fold_in(key, 2)
            path_keys = request_keys(path_key, len(records) * self.config.width)
            by_node = path_keys.reshape(len(records), self.config.width, -1)
            self._continue_branches(list(zip(nodes, by_node, strict=True)))
        return [describe_node(node) for node in nodes]

    def _continue_branches(self, keyed_nodes: Sequence[tuple[Node, np.ndarray]]) -> None:
        """Sample one answer from each well-formed set of evidence, of at most k per node."""
        pairs = [
            (node, branch, branch_key)
            for node, keys in keyed_nodes
            for branch, branch_key in zip(_well_formed(node.branches), keys, strict=False)
        ]
        # A key of its own for each path: equal noise would make the reasonings more alike.
        starts = [dataclasses.replace(node, key=branch_key) for node, _, branch_key in pairs]
        before = [branch.tokens for _, branch, _ in pairs]
        samples_by_pair = dict(self._sample(starts, before, 1, ANSWER_END))
        for i, (node, branch, _) in enumerate(pairs):
            (sample,) = samples_by_pair[i]
            node.paths.append(self._branch(node, branch.tokens, sample, ANSWER_END, 4))

    def _find_evidence(self, nodes: Sequence[Node]) -> None:
        """Sample branches up to the end of the evidence, and choose the best per question."""
        width = 1 if self.config.evidence_by == "none" else self.config.width
        for i, samples in self._sample(nodes, [[] for _ in nodes], width, EVIDENCE_END):
            nodes[i].branches = [self._branch(nodes[i], [], s, EVIDENCE_END, 2) for s in samples]
            _measure_evidence(nodes[i])
        # A single well-formed branch is chosen without a score.
        items = [(n.question, formed) for n in nodes if len(formed := _well_formed(n.branches)) > 1]
        if self.config.evidence_by == "similarity":
            self._rank_by_similarity(items)
        elif self.config.evidence_by == "reranker":
            self._rank_by_reranker(items)
        elif self.config.evidence_by == "oracle":
            for branch in (branch for _, formed in items for branch in formed):
                branch.score = branch.rouge_l
        elif self.config.evidence_by == "judge":
            ask = self.prompts.evidence_scores
            self._rank_by_judge(
                [(ask(q, [b.sections[1] for b in formed]), formed) for q, formed in items],
                evidence.HIGHEST,
            )
        for node in nodes:
            node.chosen_branch = _best(node.branches)

    def _reason(self, pairs: Sequence[tuple[Node, Branch]]) -> None:
        """Sample reasonings after the chosen evidence, and choose the best per question."""
        width = 1 if self.config.reasoning_by == "none" else self.config.width
        nodes = [node for node, _ in pairs]
        before = [branch.tokens for _, branch in pairs]
        for i, samples in self._sample(nodes, before, width, ANSWER_END):
            node = nodes[i]
            node.reasonings = [self._branch(node, before[i], s, ANSWER_END, 4) for s in samples]
        if self.config.reasoning_by == "judge":
            ask = self.prompts.reasoning_scores
            self._rank_by_judge(
                [
                    (ask(n.question, branch.sections[1], [b.sections[2] for b in formed]), formed)
                    for n, branch in pairs
                    if len(formed := _well_formed(n.reasonings)) > 1
                ],
                evidence.HIGHEST_REASONING,
            )
        for node in nodes:
            node.best = _best(node.reasonings)

    def _sample(
        self, nodes: Sequence[Node], before: Sequence[list[int]], width: int, end: str
    ) -> Iterator[tuple[int, Sequence[Sample]]]:
        """Yield (index of a node, `width` samples after its prompt and the tokens `before`)."""
        options = Options(**self.sampling, stop_strings=(end,))
        prompts = [
            Prompt([*node.prompt.ids, *tokens]) for node, tokens in zip(nodes, before, strict=True)
        ]
        keys = np.array([node.key for node in nodes], np.uint32).reshape(-1, 2)
        for i, reply in self.policy.ask(prompts, width, options, keys):
            assert reply is not None  # `answer` leaves out prompts without room
            yield i, reply.samples

    def _branch(
        self, node: Node, before: list[int], sample: Sample, end: str, sections: int
    ) -> Branch:
        """Parse a sample after the tokens `before` into its first `sections` sections."""
        tokens = [*before, *sample.content]
        text = node.prompt.thought + self.policy.tokenizer.decode(tokens)
        # The last token may go on after the tag. The text ends at the tag, the tokens stay as
        # sampled, because the continuation must read what the policy wrote.
        if sample.stop_string:
            text = text[: text.rindex(end) + len(end)]
        parsed = evidence.parse_sections(text, sections) or ()
        return Branch(tokens, text, parsed, sample.logprob)

    def _rank_by_similarity(self, items: Sequence[tuple[str, list[Branch]]]) -> None:
        """Set scores from -1 to 1: cosines between the vectors of question and evidence."""
        assert self.embed is not None
        texts = [text for q, formed in items for text in (q, *(b.sections[1] for b in formed))]
        vectors = iter(self.embed(texts) if texts else ())
        for _, branches in items:
            question = next(vectors)
            for branch in branches:
                branch.score = float(np.dot(question, next(vectors)))

    def _rank_by_reranker(self, items: Sequence[tuple[str, list[Branch]]]) -> None:
        """Score each evidence alone, from 0 to 1; None if the reranker gives no score."""
        assert self.rerank is not None
        ask = self.prompts.reranker
        branches = [(question, branch) for question, formed in items for branch in formed]
        scores = self.rerank([ask(question, b.sections[1]) for question, b in branches])
        for (_, branch), score in zip(branches, scores, strict=True):
            branch.score = score

    def _rank_by_judge(self, items: Sequence[tuple[str, list[Branch]]], highest: int) -> None:
        """Set scores from 1 to `highest` of (prompt, branches), and the judge's preferred branch.

        Scores are None for a missing or malformed reply.
        """
        assert self.judge is not None
        # Equal prompts are asked once, and share the reply.
        prompts = list(dict.fromkeys(prompt for prompt, _ in items))
        replies = {prompts[i]: reply for i, reply in self.judge(prompts)} if prompts else {}
        failed = 0
        for prompt, branches in items:
            reply, count = replies.get(prompt) or "", len(branches)
            scores = evidence.parse_scores(reply, count, highest)
            failed += scores is None
            for branch, score in zip(branches, scores or [None] * count, strict=True):
                branch.score = score
            if scores and (best := evidence.parse_best_choice(reply, count)) is not None:
                branches[best].is_preferred = True
        if failed:
            log.warning("no scores of %d of %d groups of branches", failed, len(items))


def describe_node(node: Node) -> Record:
    """Return the request and its tree as a line of the output.

    "prediction", what the rule reads, and "stated", what a judge reads, are None without a
    well-formed answer. "right" needs the true "answer", and also
    accepts all of "answers". "best_chosen" (see evidence.best_chosen) needs the known "evidence".
    """
    record, task = node.record, _task(node.record)
    documents = evidence.searchable(record["documents"])
    branches = [
        _describe_branch(branch, branch is node.chosen_branch)
        | {"verbatim": evidence.verbatim_share("".join(branch.sections[1:2]), documents)}
        for branch in node.branches
    ]
    prediction, stated, response = None, None, ""
    if node.best is not None:
        response = evidence.with_answer_phrase(node.best.sections[3], task)
        prediction = rules.extract_answer(response, task)
        stated = rules.stated_answer(response, task)
    result = record | {
        "branches": branches,
        "reasonings": [
            _describe_branch(reasoning, reasoning is node.best) for reasoning in node.reasonings
        ],
        "prediction": prediction,
        "stated": stated,
    }
    if node.paths:
        result["paths"] = [_describe_branch(path, False) for path in node.paths]
    if node.known_evidence:
        result["best_chosen"] = _best_chosen(node)
    if isinstance(record.get("answer"), str):
        right = (record["answer"], *record.get("answers", []))
        result["right"] = any(rules.score(response, text, task) == 1 for text in right)
    return result


def _describe_branch(branch: Branch, is_chosen: bool) -> Record:
    return {
        "text": branch.text,
        "well_formed": bool(branch.sections),
        "score": branch.score,
        "rouge_l": branch.rouge_l,
        "logprob": branch.logprob,
        "tokens": len(branch.tokens),
        "chosen": is_chosen,
    }


def _measure_evidence(node: Node) -> None:
    """Set the ROUGE-L recall of well-formed branches, if the evidence is known."""
    if node.known_evidence:
        for branch in _well_formed(node.branches):
            branch.rouge_l = rouge_l_recall(branch.sections[1], "\n".join(node.known_evidence))


def _best_chosen(node: Node) -> float | None:
    """Return evidence.best_chosen of the branches; None also if a branch has no score."""
    measured = [(b.rouge_l, b.score) for b in _well_formed(node.branches)]
    pairs = [(truth, score) for truth, score in measured if truth is not None and score is not None]
    if not pairs or len(pairs) < len(measured):
        return None
    truth, scores = zip(*pairs, strict=True)
    return evidence.best_chosen(truth, scores)


def _well_formed(branches: Sequence[Branch]) -> list[Branch]:
    return [branch for branch in branches if branch.sections]


def _best(branches: Sequence[Branch]) -> Branch | None:
    """Return the well-formed branch with the highest score.

    Of equal scores, the judge's preferred branch wins, or else the first.
    """
    formed = _well_formed(branches)
    # Our choice: branches without a score come last, so a failed judge leaves the first
    # well-formed branch.
    return max(
        formed,
        key=lambda b: (-math.inf if b.score is None else b.score, b.is_preferred),
        default=None,
    )


def _task(record: Record) -> str:
    return record.get("task", "general_qa")


@dataclasses.dataclass(frozen=True)
class Reranker:
    """A causal language model as reranker, such as Qwen3-Reranker: it says yes or no.

    The score of a prompt is the probability of yes, by the more likely one of the two words. It is
    None if the model says something else, or the prompt is longer than its context.
    """

    model: TextModel

    def __call__(self, prompts: Sequence[str]) -> list[float | None]:
        keys = np.zeros((len(prompts), 2), np.uint32)  # unused: decoding is greedy
        options = Options(temperature=0.0, max_tokens=1)
        scores: list[float | None] = [None] * len(prompts)
        for i, reply in self.model.ask(prompts, 1, options, keys):
            if reply is None:
                continue
            (sample,) = reply.samples
            word = self.model.tokenizer.decode(sample.content).strip().lower()
            probability = math.exp(sample.logprob)
            # After "no" the score is 1 - p(no): it counts the mass of all words but "no" as yes,
            # which is negligible for a model that was trained to say one of both.
            scores[i] = {"yes": probability, "no": 1 - probability}.get(word)
        self.model.release()
        if failed := scores.count(None):
            log.warning("no score of %d of %d sets of evidence", failed, len(scores))
        return scores


# ----------------------------------------------------------- spell_jax.generate, from the flags


def run(flag_values: Any) -> None:
    """Answer the questions of --prompts with trees and write --out."""
    policy, prompts, sampling = generation.load(flag_values)
    tree_choices = flag_values.evidence_by, flag_values.reasoning_by, flag_values.every_branch
    config = TreeConfig(flag_values.width, *tree_choices)
    judge = _make_judge(flag_values, policy) if "judge" in dataclasses.astuple(config) else None
    embed = _make_embed(flag_values) if config.evidence_by == "similarity" else None
    rerank = _make_reranker(flag_values) if config.evidence_by == "reranker" else None
    tree = EvidenceTree(policy, config, prompts, sampling, judge, embed, rerank)
    make = functools.partial(make_prompt, needs_evidence=config.evidence_by == "oracle")
    requests = generation.read_requests(flag_values.prompts, prompts, make)
    entry.setup_done()
    lines = tree.answer(*requests, flag_values.seed)
    shares = [share for line in lines if (share := line.get("best_chosen")) is not None]
    if shares:
        mean = sum(shares) / len(shares)
        log.info("the best evidence was chosen in %.3f of %d questions", mean, len(shares))
    generation.write_answers(flag_values, lines)


def _make_judge(flag_values: Any, policy: TextModel) -> AskJudge:
    """Make the judge of branches: an endpoint, another policy, or `policy` itself by default."""
    cap = flag_values.judge_max_tokens
    if not flags.check_model(flag_values, "judge"):
        return PolicyReplier(policy, cap)
    replier, _ = make_replier(
        "judge",
        url=flag_values.judge_url,
        model=flag_values.judge_model,
        policy=flag_values.judge_policy,
        dtype=flag_values.dtype,
        sampling={"max_tokens": cap},
    )
    if flag_values.judge_policy:
        return replier
    # One host asks and broadcasts the replies: all hosts continue from the same branch.
    return lambda texts: distributed.broadcast(lambda: list(replier(texts)))


def _make_reranker(flag_values: Any) -> Rerank:
    if not flag_values.reranker:
        raise app.UsageError("--reranker: must be a Hugging Face folder, for reranker")
    thinking = choices.THINKING[flag_values.reranker_thinking]
    return Reranker(TextModel(flag_values.reranker, flag_values.dtype, thinking))


def _make_embed(flag_values: Any) -> Embed:
    if not flag_values.embedder:
        raise app.UsageError("--embedder: must be a Hugging Face folder, for similarity")
    mesh, max_tokens = meshes.make_mesh(), flag_values.embed_max_tokens
    embedder = Embedder(flag_values.embedder, mesh, max_tokens, EMBED_TOKENS, flag_values.dtype)
    return lambda texts: embedder.embed([embedder.encode(text)[0] for text in texts])
