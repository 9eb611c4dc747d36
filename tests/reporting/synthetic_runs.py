"""Folders of synthetic runs: config, metrics, episodes and an evaluation."""

from __future__ import annotations

import dataclasses
import pathlib
import random
from collections.abc import Mapping
from typing import Any

from etils import epath

from spell_jax.reporting.page import RunData
from spell_jax.reporting.tables import EVALUATION_FILE, read_evaluation
from spell_jax.runtime.files.episodes import EpisodeWriter
from spell_jax.runtime.files.jsonl import write_json, write_records
from spell_jax.runtime.files.paths import CONFIG_FILE
from spell_jax.runtime.log.metrics import METRICS_FILE, read_metrics
from spell_jax.selfplay import rewards

TASKS = ("general_qa", "financial_math", "multiple_choice")
QUESTIONER = {"mapping": "gaussian", "mu": 0.5, "sigma": 0.5 / 3}
CONFIG = {"seed": 0, "steps": 4, "algorithm": {"questioner": QUESTIONER}}
_LETTERS = "abcdefghijklmnoprstuvwy"
_WORDS = 5000
_METRICS = ("solve_rate", "mixed", "accepted", "bad_format", "verdict_differs_from_rule")


@dataclasses.dataclass(frozen=True)
class RunSizes:
    """Sizes of a synthetic run."""

    documents: int = 4  # of a cluster
    document: int = 300  # characters
    answer: int = 40  # characters
    answers: int = 4  # G to a question
    votes: int = 3  # on each answer
    clusters: int = 1_000_000  # distinct clusters of the run


class RunWriter:
    """Generator of a run's texts and metrics, deterministic given the seed."""

    def __init__(self, seed: int = 0, sizes: RunSizes = RunSizes()):
        self.sizes, self.rng = sizes, random.Random(seed)
        # Few words are frequent, as in real text, so that the text compresses as well as real text.
        words = ["".join(self.rng.choices(_LETTERS, k=2 + n % 9)) for n in range(_WORDS)]
        weights = [1 / (n + 5) for n in range(_WORDS)]
        self._prose = " ".join(self.rng.choices(words, weights, k=300_000))

    def prose(self, characters: int) -> str:
        start = self.rng.randrange(len(self._prose) - characters)
        return self._prose[start : start + characters].strip() + "."

    def episode(self, number: int, **changes: Any) -> dict[str, Any]:
        """Make an episode as the algorithm records it, of cluster `number` modulo their number.

        Its answers quote the second document. `changes` replace fields.
        """
        sizes, rng = self.sizes, self.rng
        port = number % sizes.clusters
        year = 1800 + port
        main_rng, self.rng = rng, random.Random(port)  # a cluster always has the same documents
        documents = [
            f"Document {n} of {port}. {self.prose(sizes.document)}" for n in range(sizes.documents)
        ]
        self.rng = main_rng
        documents[1] += f" The lighthouse of Port {port} was first lit in {year} by its keeper."
        quote = f"It says: the lighthouse of Port {port} was first lit in {year}, so {year}."
        count = sizes.answers
        solved = rng.choice((0, 0, count // 2, count))
        rule = [1.0] * solved + [0.0] * (count - solved)
        wrong = ["1700"] * (count - solved - 1) + [None] * (solved < count)
        reward = rewards.questioner_reward(solved / count) if 0 < solved < count else 0.0
        use = "used" if 0 < solved < count else "equal_rewards"
        episode: dict[str, Any] = {
            "task": rng.choice(TASKS),
            "cluster": f"c{port}",
            "documents": documents,
            "shown": [1, sizes.documents - 1],
            "known": ["What was asked before?"],
            "prompt": "Write a question about {documents[1]}",
            "status": "accepted",
            "reason": "",
            "proposal": f"<think>{self.prose(sizes.answer)}</think> When was Port {port} lit?",
            "question": f"When was the lighthouse of Port {port} first lit?",
            "reference": str(year),
            "own_reference": str(year),
            "blind": ["unknown"],
            "answers": [f"{self.prose(sizes.answer)} {quote} Answer {n}" for n in range(count)],
            "predictions": [str(year)] * solved + wrong,
            "rule": rule,
            "judge": [],
            "votes": [[int(score), -1, *[1] * (sizes.votes - 2)] for score in rule],
            "scores": rule,
            "reward": reward,
            "advantages": {"verifier": [[] for _ in rule]},
            "used": {"questioner": use, "responder": use, "verifier": ["not_sampled"] * count},
        }
        if use == "used":
            episode["advantages"] |= {"responder": [s - 0.5 for s in rule], "questioner": [0.5]}
        if rng.random() < 0.2:
            ended = {name: [] for name in ("answers", "predictions", "rule", "votes", "scores")}
            episode |= ended | {"status": "bad_format", "reason": "no_json", "reward": -1.0}
            use = {"questioner": "not_sampled", "responder": "bad_format", "verifier": []}
            episode |= {"advantages": {"verifier": []}, "used": use}
        return episode | changes

    def metrics(self, step: int) -> dict[str, float]:
        """Make a line of metrics under the trainer's names."""
        rng = self.rng
        line: dict[str, float] = {"step": step}
        for suffix in ("", *(f"/{task}" for task in TASKS)):
            for name in _METRICS:
                line[f"rollout/{name}{suffix}"] = rng.random() / 3 + step / 1000
            line[f"rollout/questioner_reward{suffix}"] = rng.random() - 0.5
        for role in ("questioner", "responder", "verifier"):
            line[f"rollout/answer_tokens/{role}"] = 20 + rng.random() * 9
            line[f"time/seconds/{role}"] = 30 + rng.random() * 60
        line |= {"time/seconds/rollout": 4.0, "time/seconds/update": 90 + rng.random() * 20}
        line["time/step_seconds"] = 300 + rng.random()
        for name in ("entropy", "loss"):
            line[f"train/{name}"] = 1 + rng.random()
        return line


def write_run(
    workdir: pathlib.Path,
    steps: int,
    episodes: int,
    seed: int = 0,
    sizes: RunSizes = RunSizes(),
    questioner: Mapping[str, Any] | None = None,
) -> epath.Path:
    """Write the folder of a synthetic run: config, metrics, episodes and an evaluation.

    `episodes` is per step; `questioner` has fields of config.algorithm.questioner to
    replace or add.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    writer = RunWriter(seed, sizes)
    write_json(
        workdir / CONFIG_FILE,
        CONFIG | {"seed": seed, "algorithm": {"questioner": QUESTIONER | (questioner or {})}},
    )
    write_records(workdir / METRICS_FILE, [writer.metrics(step) for step in range(1, steps + 1)])
    files = EpisodeWriter(workdir, 1_000_000_000)
    for step in range(1, steps + 1):
        files.write(step, [writer.episode(step * episodes + n) for n in range(episodes)])
    tables = [{"responder, by documents": {"lookup": {"3": cell}}} for cell in (
        [0.5, 0.45, 0.56], [0.75 + seed / 10, 0.7 + seed / 10, 0.79 + seed / 10]
    )]  # fmt: skip
    write_json(workdir / EVALUATION_FILE, dict(zip(("before", "after"), tables, strict=True)))
    return epath.Path(workdir)


def measured(workdir: epath.Path) -> RunData:
    """Read a run's folder into the page's input."""
    return RunData(workdir, read_metrics(workdir), read_evaluation(workdir))
