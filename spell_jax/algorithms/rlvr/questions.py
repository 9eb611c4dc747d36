"""Build a static question set from clusters with a teacher model, for SPELL's RLVR baseline.

    python -m spell_jax.algorithms.rlvr.questions --source=DIR --out=OUT \
        --attempts=4000 --tokenizer=FOLDER
        (--teacher_url=URL --teacher_model=NAME | --teacher_policy=DIR)
        (--judge_url=URL --judge_model=NAME | --judge_policy=DIR | --agreement=rule)

1. An attempt has a task and a cluster, dealt as in training (data/stream.py), --documents of the
   cluster's documents, and for a choice the letter of the correct option. --source names clusters
   like data.source in a config; --config uses the training clusters and tasks of that run.
2. The teacher, as questioner, reads these documents and writes a question with its answer. It is
   parsed as in self-play; the options of a choice must differ. Repeats for a cluster are dropped.
3. The teacher, as responder, answers the question from all documents of the cluster.
4. Questioner and responder must agree. Letters are compared by the rule, other answers by the
   judge's verdict that the answer states the reference. --agreement=rule uses only the reward rule.
5. OUT/questions.jsonl gets the remaining questions (data/questions.py, plus "cluster" and "shown")
   for algorithm "rlvr". OUT/summary.json, which is also printed, counts the others by reason.
6. A stopped build resumes. OUT/teacher.jsonl and OUT/judge.jsonl record every reply on arrival, so
   no reply is requested twice, and a failed request is repeated. The result equals that of an
   uninterrupted build. --attempts may be raised. OUT/config.json describes the build; another build
   needs another OUT.

Keys of endpoints are read from $SPELL_TEACHER_KEY and $SPELL_JUDGE_KEY. Paper Appendix E.5: the
paper's teacher is DeepSeek-R1-0528, its judge gpt-oss-120b, and about 3,000 questions remained. On
clusters of pages with tables, this is also the "Mixed QA" half of EAPO's data (its Appendix A).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import pathlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags
from ml_collections import ConfigDict, config_flags

from spell_jax.data import config as data_config
from spell_jax.data.clusters import GROUPINGS, LETTERS, TASKS, Cluster
from spell_jax.data.questions import Question
from spell_jax.data.stream import TaskStream
from spell_jax.evaluation import judge as judging
from spell_jax.evaluation.policy_sampler import Policy, check_room
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy.model import find_folder
from spell_jax.runtime import distributed, entry, fault_injection
from spell_jax.runtime import setup as start
from spell_jax.runtime.config import check_choice, check_least
from spell_jax.runtime.jsonl import append_records, read_records, write_json
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.keys import fold_keys
from spell_jax.sampler.requests import Options
from spell_jax.selfplay import parsing, rules
from spell_jax.selfplay import prompts as prompt_sets
from spell_jax.selfplay.judge import MALFORMED, UNANSWERED, Endpoint, Judge, JudgeConfig
from spell_jax.selfplay.prompts import Prompts

TEACHER_KEY = "SPELL_TEACHER_KEY"  # an environment variable: configs are written to disk
QUESTIONS, SUMMARY, REPLIES = "questions.jsonl", "summary.json", "teacher.jsonl"
AGREEMENTS = ("judge", "rule")
KEPT = "kept"
_UNDECIDED = {MALFORMED: "judge_malformed", UNANSWERED: "judge_unanswered"}
log = logging.getLogger(
    "spell_jax.algorithms.rlvr.questions"
)  # __name__ is "__main__" if run as a script

# (prompts, their (attempt, turn) pairs) -> (prompt index, reply) in order of arrival. A reply of
# None means that the request failed.
Ask = Callable[[Sequence[str], Sequence[tuple[int, int]]], Iterable[tuple[int, str | None]]]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a build.

    Attributes:
      attempts: number of questions that the teacher is asked to write.
      batch: number of attempts processed together; a policy teacher is compiled for each batch.
      documents: m, number of documents that the questioner reads [paper: 5].
      max_answer_tokens: maximum length of a general_qa reference; longer ones are skipped.
      prompt_set: "full", "compact" or a folder of templates.
      agreement: "judge" or "rule": how agreement of questioner and responder is decided.
      seed: seed of attempts and of a policy's sampling.

    Raises:
      ValueError: if a value is out of range.
    """

    attempts: int
    batch: int = 256
    documents: int = 5
    max_answer_tokens: int = parsing.MAX_ANSWER_TOKENS
    prompt_set: str = "full"
    agreement: str = "judge"
    seed: int = 0

    def __post_init__(self):
        check_least(self, "", attempts=1, batch=1, documents=1, max_answer_tokens=1, seed=0)
        check_choice(self, "", agreement=AGREEMENTS)


@dataclasses.dataclass
class Attempt:
    """One question that the teacher is asked to write, and its outcome.

    Attributes:
      number: index of the attempt, from 0.
      task: task of the question.
      cluster: cluster that the question is about.
      shown: indices of the documents that the questioner reads.
      letter: letter of the correct option for multiple choice, else None.
      question: the parsed question.
      reference: the parsed reference answer.
      prediction: answer extracted from the responder's reply.
      reason: KEPT, or why the attempt was dropped; "" while in progress.
    """

    number: int
    task: str
    cluster: Cluster
    shown: tuple[int, ...]
    letter: str | None
    question: str = ""
    reference: str = ""
    prediction: str = ""
    reason: str = ""


# ------------------------------------------------------------------------------------ The teacher


class Teacher:
    """Client of a teacher model that records every reply in a file as it arrives.

    All processes call it together. Process 0 keeps the record and broadcasts the replies.
    """

    def __init__(self, ask: Ask, name: str, path: pathlib.Path):
        """Open the record file.

        Args:
          ask: function that requests replies.
          name: identifies the model and its sampling options; part of the key of each recorded
              reply.
          path: path of the record file, which may also hold replies of other teachers.
        """
        self.asked = 0
        self.name = name
        self._ask = ask
        self._path = path
        self._known: dict[str, str] = {}
        if jax.process_index() == 0 and path.exists():
            self._known.update(read_records(path, _read_kept)[0])

    def __call__(self, turn: int, numbers: Sequence[int], prompts: Sequence[str]) -> list[Any]:
        """Return the reply to each prompt; None where there is none.

        Args:
          turn: 0 for the questioner, 1 for the responder.
          numbers: attempt number of each prompt.
          prompts: the prompts.
        """
        is_first = jax.process_index() == 0
        keys = [self._key(turn, *both) for both in zip(numbers, prompts, strict=True)]
        missing = [i for i, key in enumerate(keys) if is_first and key not in self._known]
        wanted = [prompts[i] for i in missing], [(numbers[i], turn) for i in missing]
        with distributed.fail_together():
            for at, reply in self._ask(*wanted):
                if is_first:
                    self._keep(keys[missing[at]], reply)
        return distributed.broadcast(lambda: [self._known.get(key) for key in keys])

    def _keep(self, key: str, reply: str | None) -> None:
        """Record a reply. A missing one is not recorded, so a later run requests it again."""
        self.asked += 1
        if reply is not None:
            self._known[key] = reply
            append_records(self._path, [{"key": key, "reply": reply}])
            fault_injection.point("taught")

    def _key(self, turn: int, number: int, prompt: str) -> str:
        content = json.dumps([self.name, turn, number, prompt]).encode()
        return hashlib.blake2b(content, digest_size=16).hexdigest()


def _read_kept(line: Any) -> tuple[str, str]:
    key, reply = line["key"], line["reply"]
    if not isinstance(key, str) or not isinstance(reply, str):
        raise TypeError("key and reply must be texts")
    return key, reply


@dataclasses.dataclass(frozen=True)
class PolicyTeacher:
    """One of our policies as teacher (an Ask). Each attempt and turn has its own random key."""

    policy: Policy
    options: Options
    seed: int

    def __post_init__(self):
        check_room(self.policy, self.options.max_tokens, "teacher")

    def __call__(
        self, prompts: Sequence[str], numbers: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[int, str | None]]:
        prompts, numbers = distributed.broadcast(lambda: [list(prompts), list(numbers)])
        key = np.asarray(jax.random.key_data(jax.random.key(self.seed)))
        keys = fold_keys(key, [tuple(some) for some in numbers])
        yield from self.policy.reply(prompts, keys, self.options)


# -------------------------------------------------------------------------------------- The build


class Build:
    """Runner of attempts. `counts` maps (task, outcome) to a number of attempts."""

    def __init__(
        self,
        settings: Settings,
        prompts: Prompts,
        count_tokens: Callable[[str], int],
        teacher: Teacher,
        judge: Judge | None,
    ):
        """Create a build.

        Raises:
          ValueError: if agreement "judge" has no judge, or agreement "rule" has one.
        """
        if (judge is None) != (settings.agreement == "rule"):
            raise ValueError(
                f"agreement = {settings.agreement!r}: needs a judge where it is 'judge', and must "
                "be 'rule' without one"
            )
        self.settings = settings
        self.counts: Counter[tuple[str, str]] = Counter()
        self._prompts = prompts
        self._count_tokens = count_tokens
        self._teacher = teacher
        self._judge = judge
        self._asked: set[tuple[str, str, str]] = set()

    def deal(self, stream: TaskStream, first: int) -> list[Attempt]:
        """Return the next batch of attempts.

        The stream deals whole batches, so that a larger `attempts` does not change earlier
        attempts.
        """
        dealt = stream.next(self.settings.batch)[: self.settings.attempts - first]
        return [self._begin(first + i, *pair) for i, pair in enumerate(dealt)]

    def _begin(self, number: int, task: str, cluster: Cluster) -> Attempt:
        rng = np.random.default_rng([self.settings.seed, number])
        order = rng.permutation(len(cluster.documents))[: self.settings.documents]
        letter = LETTERS[rng.integers(len(LETTERS))] if task == "multiple_choice" else None
        return Attempt(number, task, cluster, tuple(sorted(order.tolist())), letter)

    def play(self, batch: Sequence[Attempt]) -> list[Attempt]:
        """Run write, answer and compare on a batch; return the attempts that are kept."""
        self.write(batch)
        self.answer([a for a in batch if not a.reason])
        self.compare([a for a in batch if not a.reason])
        self.counts.update((a.task, a.reason) for a in batch)
        return [a for a in batch if a.reason == KEPT]

    def write(self, batch: Sequence[Attempt]) -> None:
        """Ask the teacher, as questioner, for a question per attempt."""
        texts = [
            self._prompts.questioner(
                a.task, [a.cluster.documents[i] for i in a.shown], (), a.letter
            )
            for a in batch
        ]
        replies = self._teacher(0, [a.number for a in batch], texts)
        for attempt, reply in zip(batch, replies, strict=True):
            attempt.reason = self._read_question(attempt, reply)

    def _read_question(self, attempt: Attempt, reply: str | None) -> str:
        """Parse a reply into the attempt; return the reason for dropping it, or ""."""
        if reply is None:
            return "no_reply_of_questioner"
        parsed = parsing.parse_question(
            reply, attempt.task, self._count_tokens, self.settings.max_answer_tokens, True
        )
        if parsed.status != "accepted":
            return parsed.reason
        attempt.question, attempt.reference = parsed.question, parsed.answer.strip()
        known = attempt.task, attempt.cluster.id, " ".join(parsed.question.lower().split())
        if known in self._asked:
            return "asked_before"
        self._asked.add(known)
        return ""

    def answer(self, batch: Sequence[Attempt]) -> None:
        """Ask the teacher, as responder, for an answer per attempt."""
        texts = [self._prompts.responder(a.task, a.cluster.documents, a.question) for a in batch]
        replies = self._teacher(1, [a.number for a in batch], texts)
        for attempt, reply in zip(batch, replies, strict=True):
            attempt.prediction = rules.extract_answer(reply or "", attempt.task) or ""
            if reply is None:
                attempt.reason = "no_reply_of_responder"
            elif not attempt.prediction:
                attempt.reason = "no_answer_stated"

    def compare(self, batch: Sequence[Attempt]) -> None:
        """Decide whether questioner and responder agree; only process 0 asks the judge."""
        judged = [a for a in batch if self._judge and a.task != "multiple_choice"]
        for attempt in batch:
            agree = rules.is_correct(attempt.prediction, attempt.reference, attempt.task)
            attempt.reason = KEPT if agree else "disagreed"
        if self._judge is None:
            return
        items = [(a.question, a.prediction, a.reference) for a in judged]
        with distributed.fail_together():
            found = self._judge.judge(items if jax.process_index() == 0 else [])
        for attempt, verdict in zip(judged, distributed.broadcast(lambda: found), strict=True):
            attempt.reason = _UNDECIDED.get(verdict) or (KEPT if verdict else "disagreed")

    def summary(self) -> dict[str, Any]:
        """Return counts of attempts by task and outcome, most frequent reason first."""
        tasks = sorted({task for task, _ in self.counts})
        reasons: Counter[str] = Counter()
        for (_, reason), count in self.counts.items():
            reasons[reason] += count
        return {
            "attempts": self.counts.total(),
            KEPT: reasons.pop(KEPT, 0),
            "left_out": dict(sorted(reasons.items(), key=lambda pair: (-pair[1], pair[0]))),
            "tasks": {
                task: {
                    "attempts": sum(n for (t, _), n in self.counts.items() if t == task),
                    KEPT: self.counts[task, KEPT],
                }
                for task in tasks
            },
        }


def run(
    settings: Settings,
    stream: TaskStream,
    count_tokens: Callable[[str], int],
    teacher: Teacher,
    judge: Judge | None,
    out: str | os.PathLike[str],
) -> dict[str, Any]:
    """Build the set in `out`, a local folder, and return the summary. Only process 0 writes.

    Raises:
      FileNotFoundError, ValueError: see Build and prompts.load.
      ValueError: if `out` contains another set.
    """
    out = pathlib.Path(out)
    build = Build(settings, prompt_sets.load(settings.prompt_set), count_tokens, teacher, judge)
    made_from = dataclasses.asdict(settings) | {"teacher": teacher.name}
    made_from |= {"judge": judge.model if judge else None, "data": stream.state_dict()["data"]}
    del made_from["attempts"]  # a resumed build may raise it
    unfinished = out / f"{QUESTIONS}.part"

    def begin() -> None:
        out.mkdir(parents=True, exist_ok=True)
        start.check_same(out / start.CONFIG_FILE, made_from, "a set")
        unfinished.write_bytes(b"")

    distributed.broadcast(begin)
    entry.setup_done()
    for first in range(0, settings.attempts, settings.batch):
        kept = build.play(build.deal(stream, first))
        if jax.process_index() == 0:
            append_records(unfinished, map(_line, kept))
        done = build.summary()
        log.info("%d of %d attempts, %d kept", done["attempts"], settings.attempts, done[KEPT])

    def finish() -> dict[str, Any]:
        unfinished.replace(out / QUESTIONS)
        write_json(out / SUMMARY, build.summary())
        return build.summary()

    told = f", judge {judge.counts}" if judge else ""
    log.info("%d replies of %s were asked for%s", teacher.asked, teacher.name, told)
    return distributed.broadcast(finish)


def _line(attempt: Attempt) -> dict[str, Any]:
    a = attempt
    question = Question(a.task, a.cluster.documents, a.question, a.reference)
    return dataclasses.asdict(question) | {"cluster": a.cluster.id, "shown": list(a.shown)}


# ----------------------------------------------------------------------------------- Command line


def make_teacher(given: Any, out: pathlib.Path, sizes: SamplerConfig) -> Teacher:
    """Create the teacher selected on the command line.

    Raises:
      UsageError: if there is no teacher, half of an endpoint, or both an endpoint and a policy.
      FileNotFoundError, ValueError: see JudgeConfig, Options and weights.read_config_and_tokenizer.
    """
    url, model, folder = given.teacher_url, given.teacher_model, given.teacher_policy
    if bool(url) != bool(model) or bool(url) == bool(folder):
        raise app.UsageError(
            "--teacher_url and --teacher_model, or --teacher_policy, must say who the teacher is"
        )
    sampling = {"temperature": given.temperature, "top_p": given.top_p}
    sampling["max_tokens"] = given.teacher_max_tokens
    options = Options(**sampling)
    if folder:
        thinking = tokenizers.THINKING[given.thinking]
        policy = Policy(folder, given.dtype, thinking, sizes)
        ask: Ask = PolicyTeacher(policy, options, given.seed)
        model = f"{policy.folder.name} {policy.fingerprint()}"
    else:
        ask = _endpoint(given, model, sampling)
    name = json.dumps([model, *sampling.values(), given.thinking, given.seed])
    return Teacher(ask, name, out / REPLIES)


def _endpoint(given: Any, model: str, sampling: dict[str, Any]) -> Ask:
    try:
        config = JudgeConfig(
            given.teacher_url,
            model,
            os.environ.get(TEACHER_KEY),
            timeout_s=1800.0,  # long documents, and thoughts of tens of thousands of tokens
            attempts=8,
            workers=given.teacher_workers,
            requests_per_s=given.teacher_rate,
            **sampling,
        )
    except ValueError as error:
        raise ValueError(f"teacher's {error}") from error
    endpoint = Endpoint(config)
    return lambda prompts, numbers: endpoint.reply(prompts)


def open_clusters(given: Any) -> tuple[TaskStream, Callable[[str], int]]:
    """Open the stream of clusters, and the token counter of the policy's tokenizer.

    Raises:
      UsageError: if there is no source, or no tokenizer.
      FileNotFoundError, ValueError: see data.config.open_clusters and TaskStream.
    """
    if bool(given.source) == bool(given.config):
        raise app.UsageError("--source or --config: one of them must say where the clusters are")
    unknown = set(given.tasks) - set(TASKS)
    if unknown:
        raise app.UsageError(f"--tasks = {','.join(given.tasks)}: must be some of {TASKS}")
    config: Any = given.config or _plain_config(given)
    folder = given.tokenizer or given.teacher_policy
    if not folder and given.config:
        folder = find_folder(config.policy)
    if not folder:
        raise app.UsageError("--tokenizer: must be a folder with the policy's, to count tokens")
    words = tokenizers.load(folder)
    source, _ = data_config.open_clusters(config.data, given.seed, words.count)
    data = config.data
    stream = TaskStream(source, tuple(data.tasks), tuple(data.task_weights), given.seed)
    return stream, words.count


def _plain_config(given: Any) -> ConfigDict:
    """Build the part of a run's config that describes the clusters."""
    tiny = {"clusters": given.tiny_clusters, "documents": (8, 12)}
    data = {
        "source": given.source,
        "grouping": given.grouping,
        "documents_per_cluster": given.documents_per_cluster,
        "max_document_tokens": given.max_document_tokens,
        "held_out": given.held_out,
        "tasks": tuple(given.tasks),
        "task_weights": (1.0,) * len(given.tasks),
        "tiny": tiny,
    }
    return ConfigDict({"seed": given.seed, "data": data})


def main(_) -> None:
    start.setup()
    given = flags.FLAGS
    settings = Settings(
        given.attempts,
        given.batch,
        given.documents,
        given.max_answer_tokens,
        given.prompt_set,
        given.agreement,
        given.seed,
    )
    out, sizes = pathlib.Path(given.out), judging.read_sizes(given)
    teacher = make_teacher(given, out, sizes)
    judge = judging.make_judge(given, out, sizes)
    stream, count_tokens = open_clusters(given)
    summary = run(settings, stream, count_tokens, teacher, judge, out)
    if jax.process_index() == 0:
        print(json.dumps(summary))


def define_flags() -> None:
    config_flags.DEFINE_config_file("config", None, "A run's: its clusters and tasks are taken.")
    flags.DEFINE_string("source", "", "Clusters, as data.source of a config: a path, or tiny.")
    flags.DEFINE_string("out", None, "The folder of the set.", required=True)
    flags.DEFINE_integer("attempts", None, "Questions to write.", required=True)
    flags.DEFINE_integer("batch", Settings.batch, "Of them, under way together.")
    flags.DEFINE_integer("documents", Settings.documents, "That the questioner reads.")
    flags.DEFINE_integer("max_answer_tokens", Settings.max_answer_tokens, "Of a general answer.")
    flags.DEFINE_string("prompt_set", "full", "full, compact or a folder of templates.")
    flags.DEFINE_enum("agreement", "judge", AGREEMENTS, "Who says that two answers agree.")
    flags.DEFINE_integer("seed", 0, "Of attempts and of a policy's draws.")
    flags.DEFINE_list("tasks", list(TASKS), "With --source.")
    flags.DEFINE_enum("grouping", "similarity", GROUPINGS, "Of a folder's documents.")
    flags.DEFINE_integer("documents_per_cluster", 20, "Of a folder's clusters.")
    flags.DEFINE_integer("max_document_tokens", 3200, "Longer documents are cut.")
    flags.DEFINE_float("held_out", 0.05, "Share of clusters that are left out, as in training.")
    flags.DEFINE_integer("tiny_clusters", 768, "With --source=tiny.")
    flags.DEFINE_string("tokenizer", "", "A folder with the tokenizer of the policy to train.")
    flags.DEFINE_string("teacher_url", "", "A chat-completions address.")
    flags.DEFINE_string("teacher_model", "", "The model's name there.")
    flags.DEFINE_string("teacher_policy", "", "A policy's folder, for the teacher.")
    flags.DEFINE_integer("teacher_max_tokens", 8192, "Cap of a teacher's reply.")
    flags.DEFINE_integer("teacher_workers", 16, "Requests to the teacher under way at once.")
    flags.DEFINE_float("teacher_rate", 0.0, "Requests to the teacher a second; 0: any.")
    flags.DEFINE_float("temperature", 0.7, "Of the teacher.")
    flags.DEFINE_float("top_p", 0.95, "Of the teacher.")
    flags.DEFINE_enum("thinking", "", list(tokenizers.THINKING), "For chat templates that know it.")
    judging.define_flags()


if __name__ == "__main__":
    define_flags()  # not at import time, so that one process can import several entry points
    entry.run_main(main)
