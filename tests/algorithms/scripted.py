"""Algorithms with scripted models: a script answers every prompt, and rows are read as text."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, TypeVar

import numpy as np

from spell_jax.algorithms.base import Algorithm, AlgorithmContext, make_record
from spell_jax.algorithms.config import AlgorithmConfig
from spell_jax.algorithms.spell.algorithm import Spell
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.algorithms.spell.episode import SpellEpisode
from spell_jax.data.clusters import PAPER_TASKS, Cluster, in_memory
from spell_jax.data.samples import Sample
from spell_jax.data.stream import TaskStream
from spell_jax.learner.packing import TrainGroup
from spell_jax.rollout.replies import AskModels, Prompt, Replies, Reply, make_reply
from spell_jax.runtime.config import build
from spell_jax.selfplay import prompts

AnyConfig = TypeVar("AnyConfig", bound=AlgorithmConfig)
PROMPTS = prompts.load("compact")
LONG = "word " * 41
CUT = "…"  # in a scripted text that the token cap cut off
QA, MATH, CHOICE = PAPER_TASKS


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of an algorithm to its models."""

    role: str
    prompts: Sequence[str]
    group: int = 1
    model: str = "policy"
    temperature: float | None = None
    options: tuple[tuple[str, Any], ...] = ()  # other fields of Options


def _make_call(
    role: str,
    prompts: Sequence[str],
    group: int = 1,
    model: str = "policy",
    temperature: float | None = None,
    **options: Any,
) -> Call:
    return Call(role, prompts, group, model, temperature, tuple(options.items()))


class PendingCall:
    """A call of a coroutine that awaits its replies."""

    def __init__(self, call: Call):
        self.call = call
        self.replies = Replies()

    def __await__(self) -> Generator[PendingCall, None, Replies]:
        yield self
        return self.replies


class ScriptedModels:
    """`AskModels` with texts of `write(role, prompt, sibling, model)`.

    A result of None means that the prompt is over the cap, a text with CUT that the token cap cut
    it off. Coroutines take turns, and equal requests of a turn are one call. Tokens are the bytes
    of the texts, so that training rows can be read.
    """

    def __init__(self, write: Callable[[str, str, int, str], str | None], truncated: str = "zero"):
        self._write, self._truncated = write, truncated
        self.calls: list[Call] = []

    def __call__(self, *arguments: Any, **options: Any) -> Replies:
        call = _make_call(*arguments, **options)
        call = dataclasses.replace(call, prompts=tuple(call.prompts))
        self.calls.append(call)
        replies = Replies(len(call.prompts))
        for place, prompt in enumerate(call.prompts):
            texts, reply = self._reply(call.role, prompt, call.group, call.model)
            replies[place] = reply
            replies.dropped[place] = () if reply else texts
        return replies

    def run_all(self, function: Callable[..., Coroutine], items: Sequence[Any]) -> list[Any]:
        running = {i: function(self._ask, item) for i, item in enumerate(items)}
        results: dict[int, Any] = {}
        while running:
            pending: dict[int, PendingCall] = {}
            for i, coroutine in running.items():
                try:
                    pending[i] = coroutine.send(None)
                except StopIteration as end:
                    results[i] = end.value
            kinds: dict[tuple, list[PendingCall]] = {}
            for request in pending.values():
                call = request.call
                kind = call.role, call.group, call.model, call.temperature, call.options
                kinds.setdefault(kind, []).append(request)
            for (role, group, model, temperature, options), alike in kinds.items():
                prompts = [prompt for request in alike for prompt in request.call.prompts]
                replies = self(role, prompts, group, model, temperature, **dict(options))
                pairs = iter(zip(replies, replies.dropped, strict=True))
                for request in alike:
                    request.replies = Replies(len(request.call.prompts))
                    for place in range(len(request.call.prompts)):
                        request.replies[place], request.replies.dropped[place] = next(pairs)
            running = {i: running[i] for i in pending}
        return [results[i] for i in range(len(items))]

    async def _ask(self, *arguments: Any, **options: Any) -> Replies:
        call = _make_call(*arguments, **options)
        return await PendingCall(call) if call.prompts else Replies()

    def _reply(
        self, role: str, prompt: str, group: int, model: str
    ) -> tuple[tuple[str, ...], Reply | None]:
        texts = [self._write(role, prompt, sibling, model) for sibling in range(group)]
        written_texts = [text for text in texts if text is not None]
        if len(written_texts) < group:
            return (), None
        samples = []
        for text in written_texts:
            tokens = np.array(list(text.encode()) or [0], np.int32)
            is_whole = CUT not in text
            logprobs = np.full(len(tokens), -1.0, np.float32)
            # As after a stop string, so that the last byte counts as text, not as a stop token.
            samples.append(Sample(tokens, logprobs, is_whole, "\0" if is_whole else ""))
        reply = make_reply(Prompt(list(prompt.encode())), samples, _decode, self._truncated)
        return tuple(written_texts), reply if reply.samples else None


def _decode(ids: Sequence[int]) -> str:
    # An empty text has one token, 0.
    return bytes(map(int, ids)).decode(errors="replace").rstrip("\0")


def roll_out(algorithm: Algorithm, ask: AskModels, step: int, seed: int = 0) -> list[Any]:
    """Return the episodes of a step."""
    return list(algorithm.rollout(ask, (seed, step), step))


def to_groups(algorithm: Algorithm, episodes: Sequence[Any], step: int = 1) -> list[TrainGroup]:
    """Return the training groups of a step with seed 0."""
    return algorithm.groups(episodes, (0, step))[0]


def to_records(algorithm: Algorithm, episodes: Sequence[Any], step: int = 1) -> list[dict]:
    """Return the records of a step with seed 0."""
    _, annotations = algorithm.groups(episodes, (0, step))
    return [make_record(e, a) for e, a in zip(episodes, annotations, strict=True)]


def read(group: TrainGroup) -> tuple[str, tuple[str, ...], tuple[float, ...]]:
    """Return (prompt, answers, advantages) of a training group of a scripted algorithm."""
    answers = tuple(bytes(sample.tokens.tolist()).decode() for sample in group.samples)
    return (
        bytes(group.prompt).decode(),
        answers,
        tuple(round(float(a), 4) for a in group.advantages),
    )


@dataclasses.dataclass(frozen=True)
class Row:
    """Script for one cluster.

    Attributes:
      task: task of the cluster.
      written: output of the questioner: "ok", "bad_json", "noopt", "zero", "long", "word", "think".
      blind: whether the question is answered correctly without documents.
      right, paraphrased: number of right answers; number of the other answers that are worded
        differently. The rest state no answer.
      yes: number of YES votes for a paraphrase; the rest are NO. A right answer gets YES from all
        verdicts, except for one NO where the cluster number is odd.
    """

    task: str
    written: str
    blind: int
    right: int
    paraphrased: int
    yes: int


@dataclasses.dataclass
class Script:
    """Models that follow rows; `Row.yes` counts among `votes` verdicts.

    Attributes:
      reader: cluster number -> answers of the frozen reader; all are right where there are none.
      over: function that tells whether a prompt is over the cap.
      verdicts: cluster number -> texts of the verdicts on its answers, instead of YES and NO.
    """

    rows: Sequence[Row]
    votes: int = 4
    reader: dict[int, Sequence[str]] = dataclasses.field(default_factory=dict)
    over: Callable[[str, str, str], bool] = lambda role, prompt, model: False
    verdicts: dict[int, Sequence[str]] = dataclasses.field(default_factory=dict)

    def __call__(self, role: str, prompt: str, sibling: int, model: str) -> str | None:
        if self.over(role, prompt, model):
            return None
        if role == "questioner":
            return self.proposal(int(re.findall(r"d(\d+)\.", prompt)[0]))
        at = int(re.findall(r"Q(\d+)", prompt)[0])
        if role == "verifier":
            return self._verdict(at, prompt, sibling)
        if model == "reference_reader":
            texts = self.reader.get(at, (self.reference(at),))
            return f"answer is {texts[sibling % len(texts)]}"
        row = self.rows[at]
        if prompt.startswith(prompts.NO_DOCUMENTS):
            return f"answer is {self.reference(at) if row.blind else 'unknown'}"
        if sibling < row.right:
            return f"answer is {self.reference(at)}"
        if sibling < row.right + row.paraphrased:
            return f"answer is {self.paraphrase(at)}"
        return "I cannot tell."

    def reference(self, at: int) -> str:
        return {"general_qa": f"alpha{at}", "financial_math": str(10 + at)}.get(
            self.rows[at].task, "B"
        )

    def paraphrase(self, at: int) -> str:
        return {"general_qa": f"beta{at}", "financial_math": str(777 + at)}.get(
            self.rows[at].task, "C"
        )

    def proposal(self, at: int) -> str:
        task, written = self.rows[at].task, self.rows[at].written
        if written == "bad_json":
            return f"Q{at:02d} but no JSON"
        if written == "think":
            return "<think> on and on"
        word = {"general_qa": "what", "financial_math": "how much"}.get(task, "which")
        answer = {"zero": "0", "long": LONG, "word": "plenty"}.get(written, self.reference(at))
        record: dict[str, Any] = {"question": f"Q{at:02d} {word}?", "answer": answer}
        if task == "multiple_choice" and written != "noopt":
            record["options"] = {letter: f"{letter.lower()}1" for letter in "ABCD"}
        return json.dumps(record)

    def _verdict(self, at: int, prompt: str, sibling: int) -> str:
        if at in self.verdicts:
            return self.verdicts[at][sibling]
        is_right = f"one: {self.reference(at)}\n" in prompt
        yes = self.votes - at % 2 if is_right else self.rows[at].yes
        return "[[YES]]" if sibling < yes else "[[NO]]"


class Deck:
    """A stream that cycles through the clusters in order."""

    def __init__(self, rows: Sequence[Row], documents: int = 3):
        self.repeats = 0
        self._at = 0
        self._pairs = [
            (row.task, Cluster(f"d{i}", tuple(f"d{i}.{n} text" for n in range(documents))))
            for i, row in enumerate(rows)
        ]

    def next(self, batch: int) -> list[tuple[str, Cluster]]:
        dealt = [self._pairs[(self._at + i) % len(self._pairs)] for i in range(batch)]
        self._at += batch
        return dealt

    def read(self, ids: Sequence[str]) -> list[Cluster]:
        by_id = {cluster.id: cluster for _, cluster in self._pairs}
        return [by_id[name] for name in ids]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at = state["at"]


SMALL = {
    "questions": 6,
    "max_generations": 1,
    "group_size": 4,
    "verifier__group_size": 4,
    "questioner__documents": (2,),
    "verifier__share": 0.25,
}


def make_config(cls: type[AnyConfig], **fields: Any) -> AnyConfig:
    """Make an algorithm's config; `section__field` is a field of a section."""
    sections: dict[str, Any] = {}
    for name, value in fields.items():
        section, _, field = name.rpartition("__")
        (sections.setdefault(section, {}) if section else sections)[field] = value
    return build(cls, sections, "algorithm")


def make_small_config(cls: type[AnyConfig], **fields: Any) -> AnyConfig:
    """Make a config with the fields of SMALL that the algorithm has."""
    present = cls()
    small = {name: v for name, v in SMALL.items() if hasattr(present, name.partition("__")[0])}
    return make_config(cls, **(small | fields))


def make_algorithm(rows: Sequence[Row], *, cluster: int = 3, cap: int = 10_000, **options) -> Spell:
    """Make an algorithm of one round over all rows, with `cluster` documents per cluster."""
    judge = options.pop("judge", None)
    deck: Any = options.pop("stream", None) or Deck(rows, cluster)
    config = make_small_config(SpellConfig, **({"generation_batch": len(rows)} | options))
    return Spell(config, make_context(deal=lambda _: deck, prompt_cap=cap, judge=judge))


def make_context(**fields) -> AlgorithmContext:
    """Make the context of an algorithm without any documents; tokens are words."""
    context: dict[str, Any] = {
        "prompts": PROMPTS,
        "count_tokens": lambda text: len(text.split()),
        "prompt_cap": 10_000,
        "seed": 0,
        "steps": 10,
        "clusters": lambda: in_memory([]),
        "held_out": lambda: in_memory([]),
        "deal": lambda source: TaskStream(source, PAPER_TASKS, (1.0, 1.0, 1.0), seed=0),
        "questions": lambda: (),
    }
    return AlgorithmContext(**(context | fields))


def number(episode: SpellEpisode) -> int:
    """Return the number of the row that an episode follows."""
    return int(episode.cluster.id[1:])


def by_role(groups: Sequence[TrainGroup]) -> dict[str, list[TrainGroup]]:
    groups_by_role: dict[str, list[TrainGroup]] = {
        "responder": [],
        "questioner": [],
        "verifier": [],
    }
    for group in groups:
        groups_by_role[group.name].append(group)
    return groups_by_role


# Every outcome of a question; the comment is the mean reward with the default switches.
ROWS = (
    Row(QA, "ok", 0, 2, 1, 4),  # 3/4, of which the verifier alone accepts one
    Row(CHOICE, "ok", 0, 1, 1, 0),  # 1/4
    Row(MATH, "ok", 0, 3, 0, 0),  # 3/4
    Row(QA, "bad_json", 0, 0, 0, 0),
    Row(CHOICE, "noopt", 0, 0, 0, 0),
    Row(MATH, "zero", 0, 0, 0, 0),
    Row(QA, "long", 0, 0, 0, 0),
    Row(QA, "think", 0, 0, 0, 0),
    Row(CHOICE, "ok", 1, 2, 0, 0),  # answered without documents
    Row(MATH, "ok", 1, 2, 0, 0),  # answered without documents
    Row(QA, "ok", 0, 4, 0, 0),  # 1
    Row(QA, "ok", 0, 0, 0, 0),  # 0
    Row(MATH, "ok", 0, 1, 1, 1),  # 1/4, and one of four verdicts on the wrong answer is yes
    Row(QA, "ok", 0, 1, 2, 3),  # 3/4
    Row(MATH, "ok", 0, 2, 1, 4),  # 1/2
    Row(CHOICE, "ok", 0, 3, 1, 4),  # 1
    Row(QA, "ok", 0, 0, 2, 4),  # 1/2, by the verifier alone
    Row(MATH, "ok", 0, 3, 1, 1),  # 3/4, and one of four verdicts on the wrong answer is yes
)
VERDICTS = {
    2: ("?", "?", "?", "[[YES]]"),  # malformed: the verifier is ignored
    14: ("[[NO]]",) * 4,  # contradicts the rule: the higher reward counts
}


class Rollout:
    """Results of a step that tests compare, by name."""

    def __init__(self, rows=ROWS, step: int = 1, script: Script | None = None, **options: Any):
        self.algorithm = make_algorithm(rows, **({"verifier__share": 1.0} | options))
        script = script or Script(rows, verdicts=VERDICTS)
        self.ask = ScriptedModels(script, self.algorithm.config.truncated)
        self.episodes: list[SpellEpisode] = roll_out(self.algorithm, self.ask, step)
        groups, self.annotations = self.algorithm.groups(self.episodes, (0, step))
        self.groups = by_role(groups)

    def records(self) -> list[dict[str, Any]]:
        pairs = zip(self.episodes, self.annotations, strict=True)
        return [make_record(e, annotation) for e, annotation in pairs]

    def facts(self) -> dict[str, Any]:
        rows = {name: [read(g) for g in groups] for name, groups in self.groups.items()}
        return {
            "calls": [(c.role, c.group, len(c.prompts), c.model) for c in self.ask.calls],
            "shown": [(e.shown, len(e.history)) for e in self.episodes],
            "status": [(e.status, e.reason) for e in self.episodes],
            "reference": [e.reference for e in self.episodes],
            "rule": [e.rule for e in self.episodes],
            "votes": [e.votes for e in self.episodes],
            "scores": [e.scores for e in self.episodes],
            "rewards": [e.reward for e in self.episodes],
            "memory": self.algorithm.questioner.memory.state_dict(),
        } | rows

    def of(self, at: int):
        return next(e for e in self.episodes if number(e) == at)
