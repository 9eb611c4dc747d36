"""The experiment of the ladder world (docs/ladder.md): commands, questions and figure.

    python -m launch.experiments.ladder commands [--runs=DIR] [--seeds=0,1,...] [--arms=full,...]
    python -m launch.experiments.ladder questions --out=FILE --depths=1,2 [--count=N] [--seed=S]
    python -m launch.experiments.ladder questions --out=FILE --run=RUN
    python -m launch.experiments.ladder figure [--runs=DIR] [--out=DIR]

1. `commands` prints one line for each command, in an order in which they may run: the arms of
   config.py for all seeds (its stabilizers for two), each after its questions, then cross-play. The
   runs are below --runs, in ARM/SEED.
2. `questions` writes a file for config.data.questions: the oracle's questions, in equal shares of
   --depths, or the answered questions of a run with their references, in the order of its steps.
3. `figure` reads the runs and writes OUT/ladder.png and OUT/ladder.json (figure.py).
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from etils import epath

from spell_jax.launch.experiments.ladder import config as ladder
from spell_jax.launch.experiments.ladder import figure, world
from spell_jax.launch.experiments.ladder.rows import TASK
from spell_jax.runtime import entry
from spell_jax.runtime.files.episodes import read_episodes
from spell_jax.runtime.files.jsonl import write_json, write_records

RUNS = "runs/ladder"
SEEDS = (0, 1, 2, 3, 4)
SHALLOW = (1, 2)
_BATCH = ladder.get_config().algorithm.generation_batch  # questions of a step
_KNOWN = (*ladder.ARMS, *ladder.STABILIZERS)
_STREAM = 9  # separates the random stream of questions from the streams of other generated data


def commands(runs: str, seeds: Sequence[int], arms: Sequence[str]) -> list[str]:
    """Return the command lines of all runs, and of cross-play in the first seed's full arm.

    Arms of ladder.STABILIZERS run with the first two seeds only.
    """
    lines = []
    # A seed of all arms before the next seed: a comparison that is stopped early has whole seeds.
    for seed, arm in itertools.product(seeds, arms):
        if arm in ladder.STABILIZERS and seed not in seeds[:2]:
            continue
        flags = ""
        if arm in ladder.QUESTIONS:
            path = f"{runs}/questions/{_questions_of(arm)}-{seed}.jsonl"
            flags = f" --config.data.questions={path}"
            if arm.startswith("yoked"):
                # The shell counts the lines, because the full arm has not run when this is printed.
                source = f"--run={runs}/full/{seed}"
                flags += f" --config.steps=$(($(wc -l < {path}) / {_BATCH}))"  # each question once
            else:
                depths = SHALLOW if arm == "shallow" else world.DEPTHS
                source = f"--depths={','.join(map(str, depths))} --seed={seed}"
            lines.append(f"python -m launch.experiments.ladder questions --out={path} {source}")
        lines.append(
            f"python -m spell_jax.train --config=launch/experiments/ladder/config.py:{arm} "
            f"--workdir={runs}/{arm}/{seed} --config.seed={seed}{flags}"
        )
    if "full" in arms:
        lines += _crossplay(f"{runs}/full/{seeds[0]}")
    lines.append(f"python -m launch.experiments.ladder figure --runs={runs} --out={runs}")
    return list(dict.fromkeys(lines))  # both yoked arms train on one file


def _questions_of(arm: str) -> str:
    return "yoked" if arm.startswith("yoked") else arm


def _crossplay(run: str) -> list[str]:
    """Return commands that ask each checkpoint's responder the questions of all the run's steps."""
    config = ladder.get_config()
    lines = []
    for step in range(config.checkpoint_every, config.steps + 1, config.checkpoint_every):
        policy = f"{run}/crossplay/{step}"
        export = f"--workdir={run} --step={step} --dtype=float32 --out={policy}/policy"
        question_flags = f"--benchmarks={figure.OWN_QUESTIONS} --data={run} --max_input=144"
        lines.append(f"python -m spell_jax.export {export}")
        lines.append(
            f"python -m spell_jax.evaluate --policy={policy}/policy {question_flags} "
            f"--out={policy}/answers --samples=1 --max_tokens=52 --slots=128"
        )
    return lines


def oracle_questions(depths: Sequence[int], count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield `count` questions in equal shares of depths, each with separate documents."""
    (size,) = ladder.get_config().data.tiny.documents
    for index, depth in zip(range(count), itertools.cycle(depths), strict=False):
        # A generator for each question, so that question i does not depend on --count or --depths.
        rng = np.random.default_rng([seed, index, _STREAM])
        documents = world.make_documents(rng, size)
        question = world.sample_question(rng, documents, depth)
        yield _record(documents, question.text, question.answer)


def run_questions(run: str) -> Iterator[dict[str, Any]]:
    """Yield the answered questions of a run's episodes, with their references, in order."""
    documents: dict[str, Sequence[str]] = {}
    for _, episode in read_episodes(run):
        # Only the first record of a cluster has its documents (runtime/files/episodes.py).
        if episode.get("documents"):
            documents[episode["cluster"]] = episode["documents"]
        if episode["answers"]:
            texts = documents[episode["cluster"]]
            yield _record(texts, episode["question"], episode["reference"])


def _record(documents: Sequence[str], question: str, answer: str) -> dict[str, Any]:
    texts = list(documents)
    return {"task": TASK, "documents": texts, "question": question, "answer": answer}


def _write_questions(options: argparse.Namespace) -> None:
    if bool(options.run) == bool(options.depths):
        raise ValueError("questions: must have either --run or --depths")
    questions = (
        run_questions(options.run)
        if options.run
        else oracle_questions(_numbers(options.depths), options.count, options.seed)
    )
    rows = list(questions)
    if not rows:
        raise ValueError(f"--run = {options.run}: has no answered question in episodes/")
    out = epath.Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_records(out, rows)
    print(f"{out}: {len(rows)} questions")


def _write_figure(options: argparse.Namespace) -> None:
    folders = {arm: _run_folders(options.runs, arm) for arm in _KNOWN}
    arms = {
        arm: {seed: figure.read_run(run) for seed, run in arm_folders.items()}
        for arm, arm_folders in folders.items()
        if arm_folders
    }
    if not arms:
        raise ValueError(f"--runs = {options.runs}: has no run ARM/SEED of an arm of {_KNOWN}")
    numbers = figure.measure_arms(arms)
    if full := folders["full"]:
        numbers["crossplay"] = figure.read_crossplay(full[min(full)])
    out = epath.Path(options.out or options.runs)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "ladder.json", numbers)
    # The file of numbers has the stabilizers too; in the figure they would hide the ten arms.
    shown = {arm: runs for arm, runs in arms.items() if arm in ladder.ARMS}
    figure.draw_figure(shown, numbers, out / "ladder.png")
    print(json.dumps(numbers["areas"], indent=1))
    print(numbers["verdict"])


def _run_folders(runs: str, arm: str) -> dict[int, pathlib.Path]:
    """Return seed -> folder of the runs of an arm, seeds ascending."""
    folders = {int(p.name): p for p in pathlib.Path(runs, arm).glob("*") if p.name.isdecimal()}
    return dict(sorted(folders.items()))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m launch.experiments.ladder",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("what", choices=("commands", "questions", "figure"))
    parser.add_argument("--runs", default=RUNS, help="folder of the runs, each in ARM/SEED")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--arms", default=",".join(_KNOWN))
    parser.add_argument("--out", default="", help="file of the questions, or folder of the figure")
    parser.add_argument("--run", default="", help="workdir of the run whose questions are written")
    parser.add_argument("--depths", default="", help="depths of the oracle's questions")
    parser.add_argument("--count", type=int, default=5760, help="number of the oracle's questions")
    parser.add_argument("--seed", type=int, default=0, help="seed of the oracle's questions")
    options = parser.parse_args(arguments)
    arms = options.arms.split(",")
    if unknown := [arm for arm in arms if arm not in _KNOWN]:
        raise ValueError(f"--arms = {','.join(unknown)}: must be of {', '.join(_KNOWN)}")
    if options.what == "commands":
        print("\n".join(commands(options.runs, _numbers(options.seeds), arms)))
    elif options.what == "questions":
        _write_questions(options)
    else:
        _write_figure(options)


if __name__ == "__main__":
    with entry.user_errors():
        main()
