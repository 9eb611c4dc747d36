"""Build a static question set from clusters with a teacher model, for SPELL's RLVR baseline.

    python -m spell_jax.question_sets.teacher --source=DIR --out=OUT \\
        --attempts=4000 --tokenizer=FOLDER
        (--teacher_url=URL --teacher_model=NAME | --teacher_policy=DIR)
        (--judge_url=URL --judge_model=NAME | --judge_policy=DIR | --agreement=rule)

1. An attempt has a task and a cluster, dealt as in training (data/stream.py), --documents of the
   cluster's documents, and for a choice the letter of the correct option. --source names clusters
   like data.source in a config; --config uses the training clusters and tasks of that run.
2. The teacher, as questioner, reads these documents and writes a question with its answer. It is
   parsed as in self-play; the options of a choice must differ. Repeats for a cluster are dropped.
3. The teacher, as responder, answers the question from all documents of the cluster. Both must
   agree: letters by the rule, other answers by the judge's verdict that the answer states the
   reference. --agreement=rule uses only the reward rule.
4. OUT/questions.jsonl gets the remaining questions (data/questions.py, plus "cluster" and "shown")
   for algorithm "rlvr". OUT/summary.json, which is also printed, counts dropped attempts by reason.
5. A stopped build resumes: OUT/teacher.jsonl and OUT/judge.jsonl record every reply on arrival. The
   result equals the result of an uninterrupted build. --attempts may be raised. OUT/config.json
   describes the build; another build needs another OUT.

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
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags
from ml_collections import config_flags

from spell_jax.data import config as data_config
from spell_jax.data import tfds_sets
from spell_jax.data.clusters import GROUPINGS, LETTERS, PAPER_TASKS, Cluster
from spell_jax.data.config import DataConfig, TinyConfig
from spell_jax.data.questions import Question
from spell_jax.data.stream import TaskStream
from spell_jax.policy import choices
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy.model import find_folder
from spell_jax.rollout import flags as policy_flags
from spell_jax.rollout import judge as judging
from spell_jax.rollout.flags import check_model
from spell_jax.rollout.judge import Judge
from spell_jax.rollout.repliers import Replier, make_replier
from spell_jax.runtime import dataclass_flags, entry, fault_injection
from spell_jax.runtime import setup as start
from spell_jax.runtime.config import check_choice, check_least
from spell_jax.runtime.files import durable, paths
from spell_jax.runtime.files.jsonl import append_records, read_records, write_json
from spell_jax.runtime.hosts import distributed
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.requests import Options
from spell_jax.selfplay import parsing, rules
from spell_jax.selfplay import prompts as prompt_sets
from spell_jax.selfplay.prompts import Prompts
from spell_jax.selfplay.verdicts import MALFORMED, UNANSWERED

QUESTIONS, SUMMARY, REPLIES = "questions.jsonl", "summary.json", "teacher.jsonl"
AGREEMENTS = ("judge", "rule")
KEPT = "kept"
_UNDECIDED = {MALFORMED: "judge_malformed", UNANSWERED: "judge_unanswered"}
log = logging.getLogger("spell_jax.question_sets.teacher")  # a script's __name__ is "__main__"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a build. Invalid values raise ValueError.

    Attributes:
      attempts: questions that the teacher is asked to write.
      batch: attempts processed together; a policy teacher is compiled for each batch.
      documents: m, documents that the questioner reads [paper: 5].
      max_answer_tokens: most tokens of a general_qa reference; longer ones are skipped.
      prompt_set: "full", "compact" or a folder of templates.
      agreement: rule for the agreement of questioner and responder, one of AGREEMENTS.
      seed: seed of attempts and of a policy's sampling.
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
    """One question that the teacher is asked to write, and its outcome."""

    number: int  # index of the attempt, from 0
    task: str
    cluster: Cluster
    shown: tuple[int, ...]  # indices of the documents that the questioner reads
    letter: str | None  # of the correct option for multiple choice
    question: str = ""  # parsed from the reply, as is `reference`
    reference: str = ""
    prediction: str = ""  # extracted from the responder's reply
    stated: str = ""  # words of the responder's reply that a judge reads
    reason: str = ""  # KEPT, or why the attempt was dropped; "" while in progress


# ------------------------------------------------------------------------------------ The teacher


@dataclasses.dataclass
class Teacher:
    """Client of a teacher model that records every reply in a file as it arrives.

    All processes call it together. Process 0 keeps the record and broadcasts the replies. The file
    at `path` may also hold replies of other teachers: `name`, the model and its sampling options,
    is part of the key.
    """

    ask: Replier
    name: str
    path: pathlib.Path
    requests: int = 0

    def __post_init__(self):
        self._replies: dict[str, str] = {}
        if jax.process_index() == 0 and self.path.exists():
            self._replies.update(read_records(self.path, _parse_reply)[0])

    def __call__(self, turn: int, numbers: Sequence[int], prompts: Sequence[str]) -> list[Any]:
        """Return replies to attempts, or None; `turn` 0 asks the questioner, 1 the responder."""
        is_first = jax.process_index() == 0
        keys = [self._key(turn, *pair) for pair in zip(numbers, prompts, strict=True)]
        missing = [i for i, key in enumerate(keys) if is_first and key not in self._replies]
        missing_requests = [prompts[i] for i in missing], [(numbers[i], turn) for i in missing]
        with distributed.fail_together():
            for place, reply in self.ask(*missing_requests):
                if is_first:
                    self._record(keys[missing[place]], reply)
        return distributed.broadcast(lambda: [self._replies.get(key) for key in keys])

    def _record(self, key: str, reply: str | None) -> None:
        """Record a reply. A missing reply is not recorded, so a later run requests it again."""
        self.requests += 1
        if reply is not None:
            self._replies[key] = reply
            append_records(self.path, [{"key": key, "reply": reply}])
            fault_injection.point("taught")

    def _key(self, turn: int, number: int, prompt: str) -> str:
        # The prompt is part of the key: a changed template or document asks anew.
        content = json.dumps([self.name, turn, number, prompt]).encode()
        return hashlib.blake2b(content, digest_size=16).hexdigest()


def _parse_reply(line: Any) -> tuple[str, str]:
    key, reply = line["key"], line["reply"]
    if not isinstance(key, str) or not isinstance(reply, str):
        raise TypeError("key and reply must be texts")
    return key, reply


# -------------------------------------------------------------------------------------- The build


@dataclasses.dataclass
class Build:
    """Build of a question set: attempts of the teacher, and `counts` by (task, outcome)."""

    settings: Settings
    prompts: Prompts
    count_tokens: Callable[[str], int]
    teacher: Teacher
    judge: Judge | None
    counts: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    question_keys: set[tuple[str, str, str]] = dataclasses.field(default_factory=set)

    def __post_init__(self):
        agreement = self.settings.agreement
        if (self.judge is None) != (agreement == "rule"):
            raise ValueError(
                f"agreement = {agreement!r}: needs a judge where it is 'judge', and must be 'rule' "
                "without one"
            )

    def next_batch(self, stream: TaskStream, first: int) -> list[Attempt]:
        """Return the next attempts; whole batches are dealt, so more attempts keep earlier ones."""
        dealt = stream.next(self.settings.batch)[: self.settings.attempts - first]
        return [self._start(number, *pair) for number, pair in enumerate(dealt, first)]

    def _start(self, number: int, task: str, cluster: Cluster) -> Attempt:
        # By the attempt's number: a resumed or a longer build makes the same attempts.
        rng = np.random.default_rng([self.settings.seed, number])
        order = rng.permutation(len(cluster.documents))[: self.settings.documents]
        letter = LETTERS[rng.integers(len(LETTERS))] if task == "multiple_choice" else None
        return Attempt(number, task, cluster, tuple(sorted(order.tolist())), letter)

    def run_batch(self, batch: Sequence[Attempt]) -> list[Attempt]:
        """Run the three parts on a batch; return the attempts that are kept."""
        for part in (self.write_questions, self.answer, self.compare):
            part([a for a in batch if not a.reason])
        self.counts.update((a.task, a.reason) for a in batch)
        return [a for a in batch if a.reason == KEPT]

    def write_questions(self, batch: Sequence[Attempt]) -> None:
        texts = []
        for a in batch:
            documents = [a.cluster.documents[i] for i in a.shown]
            texts.append(self.prompts.questioner(a.task, documents, (), a.letter))
        replies = self.teacher(0, [a.number for a in batch], texts)
        for attempt, reply in zip(batch, replies, strict=True):
            attempt.reason = self._read_question(attempt, reply)

    def _read_question(self, attempt: Attempt, reply: str | None) -> str:
        """Parse a reply into the attempt; return the reason for dropping it, or ""."""
        if reply is None:
            return "no_reply_of_questioner"
        parsed = parsing.parse_question(
            reply,
            attempt.task,
            self.count_tokens,
            self.settings.max_answer_tokens,
            distinct_options=True,
            extract="lenient",
        )
        if parsed.status != "accepted":
            return parsed.reason
        attempt.question, attempt.reference = parsed.question, parsed.answer.strip()
        # Case and white space do not make another question.
        question_key = attempt.task, attempt.cluster.id, " ".join(parsed.question.lower().split())
        if question_key in self.question_keys:
            return "asked_before"
        self.question_keys.add(question_key)
        return ""

    def answer(self, batch: Sequence[Attempt]) -> None:
        texts = [self.prompts.responder(a.task, a.cluster.documents, a.question) for a in batch]
        replies = self.teacher(1, [a.number for a in batch], texts)
        for attempt, reply in zip(batch, replies, strict=True):
            arguments = reply or "", attempt.task, "lenient"
            attempt.prediction = rules.extract_answer(*arguments) or ""
            attempt.stated = rules.stated_answer(*arguments) or ""
            if reply is None:
                attempt.reason = "no_reply_of_responder"
            elif not (attempt.stated if self.judge else attempt.prediction):
                attempt.reason = "no_answer_stated"

    def compare(self, batch: Sequence[Attempt]) -> None:
        """Decide whether questioner and responder agree; only process 0 asks the judge."""
        for attempt in batch:
            pair = attempt.prediction, attempt.reference
            # Letters need no judge. For other tasks this verdict stands only without a judge.
            agree = rules.is_correct(*pair, attempt.task, extract="lenient")
            attempt.reason = KEPT if agree else "disagreed"
        if self.judge is None:
            return
        judged = [a for a in batch if a.task != "multiple_choice"]
        items = [(a.question, a.stated, a.reference) for a in judged]
        with distributed.fail_together():
            # An endpoint fails on process 0 alone; other processes would wait for its broadcast.
            replies = self.judge.judge(items if jax.process_index() == 0 else [])
        verdicts = distributed.broadcast(lambda: replies)
        for attempt, verdict in zip(judged, verdicts, strict=True):
            attempt.reason = _UNDECIDED.get(verdict) or (KEPT if verdict else "disagreed")

    def summary(self) -> dict[str, Any]:
        """Count attempts by task and outcome, most frequent reason first."""
        reasons: Counter[str] = Counter()
        tasks: dict[str, dict[str, int]] = {}
        for (task, reason), count in sorted(self.counts.items()):
            reasons[reason] += count
            task_counts = tasks.setdefault(task, {"attempts": 0, KEPT: self.counts[task, KEPT]})
            task_counts["attempts"] += count
        return {
            "attempts": self.counts.total(),
            KEPT: reasons.pop(KEPT, 0),
            "left_out": dict(sorted(reasons.items(), key=lambda pair: (-pair[1], pair[0]))),
            "tasks": tasks,
        }


def build_questions(
    settings: Settings,
    stream: TaskStream,
    count_tokens: Callable[[str], int],
    teacher: Teacher,
    judge: Judge | None,
    out: str | os.PathLike[str],
) -> dict[str, Any]:
    """Build the set in the folder `out` (ValueError if it has another); return the summary."""
    out = pathlib.Path(out)
    build = Build(settings, prompt_sets.load(settings.prompt_set), count_tokens, teacher, judge)
    made_from = dataclasses.asdict(settings) | {"teacher": teacher.name}
    made_from |= {"judge": judge.model if judge else None, "data": stream.state_dict()["data"]}
    del made_from["attempts"]  # a resumed build may raise it
    # The final name appears with the whole set: no run can train on an unfinished set.
    unfinished = out / f"{QUESTIONS}.part"

    def start_files() -> None:
        out.mkdir(parents=True, exist_ok=True)
        start.check_same(out / paths.CONFIG_FILE, made_from)
        durable.write_file(unfinished, b"")

    distributed.broadcast(start_files)
    entry.setup_done()
    for first in range(0, settings.attempts, settings.batch):
        kept_attempts = build.run_batch(build.next_batch(stream, first))
        if jax.process_index() == 0:
            append_records(unfinished, map(_line, kept_attempts))
        summary = build.summary()
        log.info(
            "%d of %d attempts, %d kept", summary["attempts"], settings.attempts, summary[KEPT]
        )

    def finish() -> dict[str, Any]:
        durable.replace(unfinished, out / QUESTIONS)
        write_json(out / SUMMARY, build.summary())
        return build.summary()

    judged = f", judge {judge.counts}" if judge else ""
    log.info("%d replies of %s were requested%s", teacher.requests, teacher.name, judged)
    return distributed.broadcast(finish)


def _line(attempt: Attempt) -> dict[str, Any]:
    a = attempt
    question = Question(a.task, a.cluster.documents, a.question, a.reference, shown=a.shown)
    return dataclasses.asdict(question) | {"cluster": a.cluster.id}


# ----------------------------------------------------------------------------------- Command line


def make_teacher(flag_values: Any, out: pathlib.Path, sizes: SamplerConfig) -> Teacher:
    """Make the teacher; UsageError, FileNotFoundError or ValueError name the flag or folder."""
    check_model(flag_values, "teacher", needed_for="the teacher")
    sampling: dict[str, Any] = {
        "temperature": flag_values.temperature,
        "top_p": flag_values.top_p,
        "max_tokens": flag_values.teacher_max_tokens,
    }
    Options(**sampling)  # checks the values before the weights are read
    # Long documents, and thoughts of tens of thousands of tokens.
    endpoint = {"timeout_s": 1800.0, "attempts": 8, "workers": flag_values.teacher_workers}
    ask, model = make_replier(
        "teacher",
        url=flag_values.teacher_url or "",
        model=flag_values.teacher_model or "",
        policy=flag_values.teacher_policy or "",
        sampling=sampling,
        dtype=flag_values.dtype,
        thinking=choices.THINKING[flag_values.thinking],
        sizes=sizes,
        seed=flag_values.seed,
        requests_per_s=flag_values.teacher_rate,
        **endpoint,
    )
    # Everything that changes a reply, because the name is part of the record's keys.
    name = json.dumps([model, *sampling.values(), flag_values.thinking, flag_values.seed])
    return Teacher(ask, name, out / REPLIES)


def open_clusters(flag_values: Any) -> tuple[TaskStream, Callable[[str], int]]:
    """Return the stream of clusters and the token counter; errors as in make_teacher."""
    if bool(flag_values.source) == bool(flag_values.config):
        raise app.UsageError("--source or --config: one of them must say where the clusters are")
    tasks = flag_values.config.data.tasks if flag_values.config else flag_values.tasks
    if set(tasks) - set(PAPER_TASKS):
        field = "--config.data.tasks" if flag_values.config else "--tasks"
        raise app.UsageError(f"{field} = {','.join(tasks)}: must be some of {PAPER_TASKS}")
    folder = flag_values.tokenizer or flag_values.teacher_policy
    if flag_values.config:
        data, folder = flag_values.config.data, folder or flag_values.config.policy.folder
    else:
        data = DataConfig(
            source=flag_values.source,
            grouping=flag_values.grouping,
            documents_per_cluster=flag_values.documents_per_cluster,
            max_document_tokens=flag_values.max_document_tokens,
            held_out=flag_values.held_out,
            tasks=tuple(flag_values.tasks),
            task_weights=(1.0,) * len(flag_values.tasks),
            tiny=TinyConfig(flag_values.tiny_clusters),
            **tfds_sets.read_flags(flag_values),
        )
    if not folder:
        raise app.UsageError("--tokenizer: must be a folder with the policy's, to count tokens")
    count = tokenizers.load(find_folder(folder, "--tokenizer", with_weights=False)).count
    source, _ = data_config.open_clusters(data, flag_values.seed, count)
    return TaskStream(source, tuple(data.tasks), tuple(data.task_weights), flag_values.seed), count


def main(_) -> None:
    start.setup()
    flag_values: Any = flags.FLAGS
    settings = dataclass_flags.read(Settings, flag_values)
    out, sizes = pathlib.Path(paths.expand_home(flag_values.out)), judging.read_sizes(flag_values)
    teacher = make_teacher(flag_values, out, sizes)
    judge = judging.judge_of_flags(flag_values, out, sizes)
    stream, count_tokens = open_clusters(flag_values)
    summary = build_questions(settings, stream, count_tokens, teacher, judge, out)
    if jax.process_index() == 0:
        print(json.dumps(summary))


def define_flags() -> None:
    config_flags.DEFINE_config_file("config", None, "A run's config; its clusters and tasks.")
    flags.DEFINE_string("source", "", "Clusters, as data.source of a config: a path, or tiny.")
    tfds_sets.define_flags()
    flags.DEFINE_string("out", None, "Folder of the question set.", required=True)
    dataclass_flags.define(Settings)
    flags.DEFINE_list("tasks", list(PAPER_TASKS), "Tasks of questions, with --source.")
    flags.DEFINE_enum("grouping", "similarity", GROUPINGS, "Grouping of a folder's documents.")
    flags.DEFINE_integer("documents_per_cluster", 20, "Size of a folder's clusters.")
    flags.DEFINE_integer("max_document_tokens", 3200, "Longer documents are cut.")
    flags.DEFINE_float("held_out", 0.0, "Share of clusters that are left out, as in training.")
    flags.DEFINE_integer("tiny_clusters", 768, "Number of clusters, with --source=tiny.")
    flags.DEFINE_string("tokenizer", "", "Folder with the tokenizer of the policy to train.")
    flags.DEFINE_string("teacher_url", "", "A chat-completions address.")
    flags.DEFINE_string("teacher_model", "", "The model's name there.")
    flags.DEFINE_string("teacher_policy", "", "Folder of a policy, as teacher.")
    flags.DEFINE_integer("teacher_max_tokens", 8192, "Maximum length of a teacher's reply.")
    flags.DEFINE_integer("teacher_workers", 16, "Concurrent requests to the teacher.")
    flags.DEFINE_float("teacher_rate", 0.0, "Requests to the teacher per second; 0: unlimited.")
    flags.DEFINE_float("temperature", 0.7, "Sampling temperature of the teacher.")
    flags.DEFINE_float("top_p", 0.95, "Probability mass of the teacher's nucleus.")
    flags.DEFINE_enum("thinking", "", list(choices.THINKING), "For chat templates that know it.")
    policy_flags.define_flags()


if __name__ == "__main__":
    define_flags()  # not at import time, so that one process can import several entry points
    entry.run_main(main)
