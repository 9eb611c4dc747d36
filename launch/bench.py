"""Benchmarks: python -m launch.bench NAME [--options], one JSON line a measure.

update   seconds of one optimiser update with shared and with repeated prompts
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from typing import Any

import jax
import numpy as np

from spell_jax.learner import loss, packing, update
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime import start


def bench_update(options: argparse.Namespace) -> dict[str, Any]:
    """One update on the same groups, packed as [prompt | G answers] and as G separate rows.

    Both layouts get the same token budget and a bucket that fits them; times are the best of
    `repeats` after compilation.
    """
    policy = PolicyConfig(
        vocab_size=options.vocab,
        width=options.width,
        layers=options.layers,
        heads=max(1, options.width // 64),
        kv_heads=max(1, options.width // 128),
        head_size=64,
        feed_forward=3 * options.width,
    )
    groups = _random_groups(options)
    results, answers = {}, options.response * options.group
    for name, length, scored in (
        ("shared", options.prompt + answers, answers),
        ("repeated", options.prompt + options.response, options.response),
    ):
        layout = update.PackingConfig(
            (packing.Bucket(length, scored),), max(options.budget, length), name == "shared"
        )
        learner = update.Learner(
            policy, update.OptimiserConfig(), loss.LossConfig(), layout, meshes.make_mesh()
        )
        results[name] = _time_updates(learner, groups, options.repeats)
    shared, repeated = results["shared"], results["repeated"]
    return {
        "bench": "update",
        "prompt": options.prompt,
        "response": options.response,
        "group": options.group,
        "groups": options.groups,
        "shared_s": shared["seconds"],
        "repeated_s": repeated["seconds"],
        "ratio": repeated["seconds"] / shared["seconds"],
        "token_ratio": options.group
        * (options.prompt + options.response)
        / (options.prompt + answers),
        "gradient_norm_difference": abs(1 - repeated["norm"] / shared["norm"]),
        "device": jax.devices()[0].device_kind,
    }


def _random_groups(options: argparse.Namespace) -> list[packing.Group]:
    rng = np.random.default_rng(0)
    return [
        packing.Group(
            rng.integers(options.vocab, size=options.prompt),
            list(rng.integers(options.vocab, size=(options.group, options.response))),
            list(rng.normal(size=options.group)),
        )
        for _ in range(options.groups)
    ]


def _time_updates(
    learner: update.Learner, groups: list[packing.Group], repeats: int
) -> dict[str, float]:
    seconds, norm = [], 0.0
    state = learner.init(jax.random.key(0))
    for attempt in range(repeats + 1):
        clock = time.perf_counter()
        state, numbers = learner.update(state, groups)
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - clock)
        if attempt == 0:
            norm = numbers["gradient_norm"]
    return {"seconds": min(seconds[1:]), "norm": norm}


@dataclasses.dataclass(frozen=True)
class _Option:
    name: str
    default: int
    help: str


_OPTIONS = {
    "update": (
        _Option("prompt", 160, "prompt tokens P"),
        _Option("response", 20, "tokens of an answer S"),
        _Option("group", 8, "answers to a prompt G"),
        _Option("groups", 32, "prompts"),
        _Option("layers", 3, "layers L"),
        _Option("width", 128, "model width D"),
        _Option("vocab", 896, "vocabulary V"),
        _Option("budget", 8192, "tokens of a micro-batch"),
        _Option("repeats", 3, "timed updates"),
    )
}
_BENCHES = {"update": bench_update}


def main() -> None:
    start.setup()
    parser = argparse.ArgumentParser(description="Benchmarks, one JSON line a measure")
    commands = parser.add_subparsers(dest="name", required=True)
    for name, options in _OPTIONS.items():
        command = commands.add_parser(name)
        for option in options:
            command.add_argument(
                f"--{option.name}", type=int, default=option.default, help=option.help
            )
    options = parser.parse_args()
    print(json.dumps(_BENCHES[options.name](options)))


if __name__ == "__main__":
    main()
