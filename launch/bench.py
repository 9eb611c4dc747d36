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
    `repeats` after compilation, peak bytes are the compiler's for one micro-batch, weights and
    gradient included.
    """
    policy = PolicyConfig(
        vocab_size=options.vocab,
        width=options.width,
        layers=options.layers,
        heads=max(1, options.width // 64),
        kv_heads=max(1, options.width // 128),
        head_size=64,
        feed_forward=3 * options.width,
        remat=options.remat,
        attention=options.attention,
    )
    groups = _random_groups(options)
    results, answers = {}, options.response * options.group
    for name, length, scored, rows in (
        ("shared", options.prompt + answers, answers, options.groups),
        (
            "repeated",
            options.prompt + options.response,
            options.response,
            options.groups * options.group,
        ),
    ):
        # No row of a micro-batch is all padding.
        budget = max(length, min(options.budget, length * rows))
        layout = update.PackingConfig((packing.Bucket(length, scored),), budget, name == "shared")
        learner = update.Learner(
            policy, update.OptimiserConfig(), loss.LossConfig(), layout, meshes.make_mesh()
        )
        results[name] = _time_updates(learner, groups, options.repeats)
    shared, repeated = results["shared"], results["repeated"]
    flops = count_flops(policy, options.prompt, options.response, options.group)
    return {
        "bench": "update",
        "prompt": options.prompt,
        "response": options.response,
        "group": options.group,
        "groups": options.groups,
        "layers": options.layers,
        "width": options.width,
        "remat": options.remat,
        "attention": options.attention,
        "shared_s": shared["seconds"],
        "repeated_s": repeated["seconds"],
        "ratio": repeated["seconds"] / shared["seconds"],
        "token_ratio": options.group
        * (options.prompt + options.response)
        / (options.prompt + answers),
        "flop_ratio": flops["repeated"] / flops["shared"],
        "shared_peak_bytes": shared["peak_bytes"],
        "repeated_peak_bytes": repeated["peak_bytes"],
        "gradient_norm_difference": abs(1 - repeated["norm"] / shared["norm"]),
        "device": jax.devices()[0].device_kind,
    }


def count_flops(policy: PolicyConfig, prompt: int, response: int, group: int) -> dict[str, float]:
    """Floating-point operations of a group's update, shared and repeated, without recomputation.

    A matrix product with weights costs 2 a weight and token forward and twice that backward;
    attention's two products cost 4 N H a pair of query and key forward and its five 2.5 times that
    backward; the head is asked for answer tokens only. P prompt tokens, G answers of S: shared,
    P + G S tokens and P^2 / 2 + G S P + G S^2 / 2 pairs; repeated, G (P + S) and G (P + S)^2 / 2.
    """
    c, answers = policy, group * response
    attention = c.width * c.head_size * (2 * c.heads + 2 * c.kv_heads)
    weights = c.layers * (attention + 3 * c.width * c.feed_forward)
    head = 6.0 * c.vocab_size * c.width * answers

    def total(tokens: float, pairs: float) -> float:
        return 6 * weights * tokens + 14 * c.layers * c.heads * c.head_size * pairs + head

    shared_pairs = prompt**2 / 2 + answers * prompt + answers * response / 2
    return {
        "shared": total(prompt + answers, shared_pairs),
        "repeated": total(group * (prompt + response), group * (prompt + response) ** 2 / 2),
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
    return {"seconds": min(seconds[1:]), "norm": norm, "peak_bytes": learner.peak_bytes(state)}


@dataclasses.dataclass(frozen=True)
class _Option:
    name: str
    default: int | str
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
        _Option("remat", "none", "what the backward pass recomputes"),
        _Option("attention", "auto", "the attention's kernel"),
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
                f"--{option.name}",
                type=type(option.default),
                default=option.default,
                help=option.help,
            )
    options = parser.parse_args()
    print(json.dumps(_BENCHES[options.name](options)))


if __name__ == "__main__":
    main()
