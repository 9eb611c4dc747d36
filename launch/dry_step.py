"""A step of a run's real algorithm without models: what it samples, and what it trains on.

1. The algorithm and the RolloutWorker are the run's own, on a DrySampler (sampler/dry.py): shared
   prefixes, pages, slots and refills equal a run's.
2. The algorithm's own function says what models write (AlgorithmSpec.write_replies). Answers have
   random lengths, geometric up to the cap.
3. Documents are generated; they fill the longest prompt. A token is 4 bytes of text.

An algorithm that takes questions is given them: writing a static set is no part of a usual step.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from spell_jax.algorithms import registry
from spell_jax.algorithms.base import AlgorithmContext
from spell_jax.algorithms.config import AlgorithmConfig
from spell_jax.algorithms.dry import RIGHT, WRONG, DryCall, in_letters
from spell_jax.data.clusters import Cluster, ClusterSource
from spell_jax.data.questions import Question
from spell_jax.data.stream import TaskStream
from spell_jax.learner.packing import TrainGroup
from spell_jax.rollout.text_model import TextSampler
from spell_jax.rollout.worker import RolloutWorker
from spell_jax.runtime.config import Config, check_least
from spell_jax.sampler.dry import AgentCounts, DrySampler
from spell_jax.sampler.engine import Sampler
from spell_jax.sampler.requests import SampleRequest
from spell_jax.selfplay.prompts import Prompts

_TASK = "general_qa"  # of all questions: prompts of other tasks differ by some hundred tokens
_TOKEN_BYTES = 4
_PARAGRAPH = 400  # characters, as many as a puzzle's option may have
# Templates that hold all documents, and tokens beside them: a question, or marks of options.
_TEMPLATES = (f"responder_{_TASK}.txt", "evidence.txt", "reconstruction.txt")
_BESIDE = 160


@dataclasses.dataclass(frozen=True)
class Workload:
    """Sizes of a step that no config fixes. All are assumptions, and flags of launch.plan --time.

    Attributes:
      prompt: tokens of the longest prompt, which has all documents.
      tokens: mean tokens of a reply; the lengths are geometric up to the cap.
      verdict_tokens: mean tokens of a verdict, likewise.
      documents: documents in a prompt with all documents, of equal lengths.
      answered: share of the written questions that pass the filters and are answered.
      mixed: share of the answered questions with partly right answers.
    """

    prompt: int
    tokens: int
    verdict_tokens: int
    documents: int = 10
    answered: float = 0.5
    mixed: float = 1.0

    def __post_init__(self):
        check_least(self, "", tokens=1, verdict_tokens=1, documents=1)
        for name in ("answered", "mixed"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be above 0, at most 1")


class DryStep(NamedTuple):
    """Counts of what a step samples, by agent, and the groups that it trains on."""

    counts_by_agent: dict[str, AgentCounts]
    groups: list[TrainGroup]


def check(config: Config, work: Workload) -> AlgorithmConfig:
    """Read the algorithm of a config; ValueError if no dry run can have it, as in `run_step`."""
    algorithm = registry.read_algorithm(config.algorithm, needs_judge=False)
    if registry.ALGORITHMS[algorithm.name].write_replies is None:
        raise ValueError(
            f"algorithm.name = {algorithm.name!r}: must have write_replies in its AlgorithmSpec, "
            "the function that writes what the models would reply, for --time"
        )
    _document_characters(algorithm.load_prompts(), work)
    return algorithm


def run_step(config: Config, sampler: Sampler, work: Workload, seed: int = 0) -> DryStep:
    """Run the first step of the config's algorithm on the sizes of `sampler`.

    `seed` is of the replies' lengths.

    ValueError if the algorithm has no function for dry replies, if prompts of `work.prompt` tokens
    are too short for templates and documents, or if a request can never fit into the pool.
    """
    algorithm_config = check(config, work)
    spec = registry.ALGORITHMS[algorithm_config.name]
    assert spec.write_replies is not None
    writer = _Writer(spec.write_replies, algorithm_config, work, seed)
    sizes = sampler.config, sampler.shape, sampler.shards
    dry_sampler = DrySampler(*sizes, writer.write, sampler.policy.mean_pairs)
    model = TextSampler(cast(Any, dry_sampler), cast(Any, DryTokenizer()))
    worker = RolloutWorker(model, jax.random.key(config.seed))
    context = _make_context(config, algorithm_config, spec, work)
    algorithm = registry.make_algorithm(algorithm_config, context)
    worker.start_step(1, {name: {} for name in ("policy", *algorithm.model_names)})
    key = config.seed, 1
    episodes = algorithm.rollout(worker, key, 1)
    worker.end_step()
    if dry_sampler.refused:
        raise ValueError(
            f"length = {work.prompt}: {dry_sampler.refused} prompts are longer; must be more"
        )
    groups, _ = algorithm.groups(episodes, key)
    return DryStep(dict(dry_sampler.counts_by_agent), groups)


# ------------------------------------------------------------------------------------------- Texts


class DryTokenizer:
    """Tokens of 4 bytes of text; the part of policy.tokenizer.Tokenizer that a rollout uses.

    Equal beginnings of texts are equal tokens, which is all that the scheduler and the packing of
    trees read of them.
    """

    def encode(self, text: str) -> np.ndarray:
        """Tokenize a text: int32 [P]; zero bytes fill the last token."""
        data = text.encode()
        return np.frombuffer(data + bytes(-len(data) % _TOKEN_BYTES), np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """Convert ids to text, up to the first id of 0, with which answers are padded."""
        text_ids = itertools.takewhile(bool, ids)
        return np.fromiter(text_ids, np.int32).tobytes().rstrip(b"\0").decode()

    def chat(self, text: str) -> np.ndarray:
        return self.encode(text)

    def open_thought(self, text: str) -> str:
        return ""

    def count(self, text: str) -> int:
        return -(-len(text.encode()) // _TOKEN_BYTES)


class _Writer:
    """Replies of all agents: the algorithm's texts, padded with id 0 to random lengths."""

    def __init__(self, write_replies: Any, config: Any, work: Workload, seed: int):
        self._write_replies, self._config, self._work = write_replies, config, work
        self._rng = np.random.default_rng(seed)
        self._tokenizer = DryTokenizer()
        self._calls: Counter[tuple[str, int]] = Counter()  # of an agent for a number of replies

    def write(self, request: SampleRequest) -> list[np.ndarray]:
        work, cap = self._work, request.options.max_tokens
        number = self._calls[request.agent, request.group]
        self._calls[request.agent, request.group] += 1
        call = DryCall(
            request.agent,
            np.asarray(request.prompt, np.int32).tobytes().rstrip(b"\0").decode(),
            request.group,
            number,
            passes=_is_in_share(number, work.answered),
            mixed=_is_in_share(number, work.mixed),
        )
        replies = self._write_replies(self._config, call)
        mean = work.verdict_tokens if replies.is_verdict else work.tokens
        # A stop token of constant probability gives geometric lengths, with a long tail that keeps
        # slots busy.
        lengths = self._rng.geometric(1 / mean, request.group)
        answers = []
        for text, length in zip(replies.texts, lengths.tolist(), strict=True):
            ids = self._tokenizer.encode(text)
            longest = cap if mean >= cap else max(length, len(ids) + 1)  # with a stop token
            tokens = np.zeros(min(cap, longest), np.int32)
            tokens[: len(ids)] = ids[: len(tokens)]
            answers.append(tokens)
        return answers


def _is_in_share(number: int, share: float) -> bool:
    """Return whether item `number` belongs to a share of all items, spread evenly."""
    # In float64, .29 * 100 is below 29: 1e-9 lifts such products to their integer.
    return int((number + 1) * share + 1e-9) > int(number * share + 1e-9)


# ------------------------------------------------------------------------------------------- Inputs


def _make_context(
    config: Config, algorithm: Any, spec: registry.AlgorithmSpec, work: Workload
) -> AlgorithmContext:
    tokenizer, prompts = DryTokenizer(), algorithm.load_prompts()
    characters = _document_characters(prompts, work)
    # As many as a step can use: one round, or as many rounds as its mixed answers take.
    round_prompts = max((budget.prompts for budget in algorithm.budgets()), default=1)
    names = [in_letters(number) for number in range(round_prompts * math.ceil(1 / work.mixed))]

    def read(ids: Sequence[str]) -> list[Cluster]:
        return [Cluster(name, _write_documents(name, work.documents, characters)) for name in ids]

    def deal(source: ClusterSource) -> TaskStream:
        return TaskStream(source, (_TASK,), (1.0,), config.seed)

    def questions() -> tuple[Question, ...]:
        if "questions" not in spec.inputs:
            return ()
        shown = tuple(range(max(1, work.documents // 2)))
        return tuple(
            Question(
                _TASK, cluster.documents, f"What is the code of {cluster.id}?", RIGHT, shown=shown
            )
            for cluster in read(names)
        )

    def judge(triples: Sequence[tuple[str, str, str]]) -> list[int]:
        return [int(WRONG not in prediction) for _, prediction, _ in triples]

    source = ClusterSource(dict.fromkeys(names), read)
    return AlgorithmContext(
        prompts=prompts,
        count_tokens=tokenizer.count,
        prompt_cap=work.prompt,
        seed=config.seed,
        steps=config.steps,
        clusters=lambda: source,
        held_out=lambda: source,
        deal=deal,
        questions=questions,
        judge=judge if "judge" in algorithm.rule else None,
        teacher_prompt=cast(Any, tokenizer.chat) if config.loss.distillation_weight else None,
    )


def _document_characters(prompts: Prompts, work: Workload) -> int:
    """Return the characters of each document; ValueError if the prompt has no room for them."""
    template = max(len(prompts.texts[name]) for name in _TEMPLATES) // _TOKEN_BYTES
    characters = _TOKEN_BYTES * (work.prompt - template - _BESIDE) // work.documents
    if characters < _PARAGRAPH // 4:
        minimum = template + _BESIDE + work.documents * _PARAGRAPH // 4 // _TOKEN_BYTES
        raise ValueError(
            f"length = {work.prompt}: must be at least {minimum}, for {work.documents} documents"
        )
    return characters


def _write_documents(name: str, count: int, characters: int) -> tuple[str, ...]:
    """Write documents of paragraphs that state RIGHT; each paragraph of a cluster occurs once."""
    documents = []
    for document in range(count):
        paragraphs = []
        for number in range(-(-characters // (_PARAGRAPH + 2))):
            place = f"{name}-{in_letters(document)}-{in_letters(number)}"
            # Names in letters and one capital a sentence: RIGHT is the only possible answer.
            text = f"Paragraph {place} says that the code is {RIGHT}."
            paragraphs.append((text + " It says no more." * 25)[:_PARAGRAPH])
        documents.append("\n\n".join(paragraphs)[:characters])
    return tuple(documents)
