"""A long run of several hosts in network namespaces with a random fault every few updates.

    python -m tests.slow.soak_hosts [--updates=300] [--every=20] [--hosts=2] [--seed=0] [--moves]
        [--folder=DIR]

Each start of the run meets one fault of tests/slow/disturbed_hosts.py, or is killed, after about
`every` updates at a random point on a random host; then all hosts are started again. At the end the
run is compared with an undisturbed one: to the bit, or with --moves, where starts alternate between
all hosts and one, to 1e-5. Prints one JSON line: counts, hours, memory, the largest difference.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import pathlib
import signal
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np

from spell_jax.policy import weights
from spell_jax.runtime.log.metrics import read_metrics
from tests import noise
from tests.slow import namespaces
from tests.slow.disturbed_hosts import FAULTS, HARMLESS, Disturbance, Hosts, finish

POINTS = ("rolled_out", "updated", "saving", "written")
CHECKPOINT_EVERY = 5


def one_start(
    options: argparse.Namespace,
    rng: np.random.Generator,
    number: int,
    runs: tuple[pathlib.Path, pathlib.Path],
    settings: dict[str, Any],
) -> tuple[str, list[int]]:
    """Start the run once with a random fault; return the fault and the exit statuses."""
    policy, workdir = runs
    count = 1 if options.moves and number % 2 else options.hosts
    faults = ["kill", *(fault for fault in FAULTS if count > 1 or fault in ("disk", "clock"))]
    fault = str(rng.choice(faults))
    point = str(rng.choice(POINTS))
    passings = int(options.every + rng.integers(-2, 3))
    if point not in POINTS[:2]:
        passings = max(1, passings // CHECKPOINT_EVERY)
    folder = workdir.parent / f"faults_{number}"
    folder.mkdir()
    disturbance = Disturbance(fault, f"{point}:{passings}", int(rng.integers(count)), folder)
    with (
        namespaces.network(count) as network,
        Hosts(network, count, policy, workdir, settings, disturbance) as hosts,
    ):
        if hosts.disturb() and fault in HARMLESS:
            with contextlib.suppress(Exception):
                hosts.processes[0].wait(20)  # goes on for a while
            for process in hosts.processes:
                process.send_signal(signal.SIGTERM)
        ended = hosts.ends()
    return f"{fault} at {point}", [code for code, _ in ended.values()]


def difference(workdir: pathlib.Path, other_workdir: pathlib.Path) -> float:
    """Return the largest difference of two policies' weights."""
    params, other_params = (weights.load(run / "policy")[1] for run in (workdir, other_workdir))
    differences = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), params, other_params)
    return max(jax.tree.leaves(differences))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("updates", 300), ("every", 20), ("hosts", 2), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--moves", action="store_true")
    parser.add_argument("--folder", type=pathlib.Path)
    options = parser.parse_args()
    folder = options.folder or pathlib.Path(tempfile.mkdtemp(prefix="soak_hosts_"))
    settings = {"steps": options.updates, "checkpoint_every": CHECKPOINT_EVERY}
    policy = noise.save_policy(folder / "noise")
    undisturbed_workdir, workdir = folder / "whole", folder / "disturbed"
    finish(options.hosts, policy, undisturbed_workdir, settings, patience=10.0 * options.updates)
    rng, clock = np.random.default_rng(options.seed), time.monotonic()
    faults: collections.Counter[str] = collections.Counter()
    statuses: collections.Counter[int] = collections.Counter()
    number = 0
    while not (workdir / "policy" / "config.json").exists():
        fault, codes = one_start(options, rng, number, (policy, workdir), settings)
        number += 1
        faults[fault] += 1
        statuses.update(codes)
        lines = read_metrics(workdir) if (workdir / "metrics.jsonl").exists() else []
        print(f"start {number}: {fault}, exit {codes}, {len(lines)} updates", file=sys.stderr)
        if number > 5 * options.updates / options.every + 10:
            print("error: too many starts without an end", file=sys.stderr)
            return 1
    memory = [
        [line["process/resident_mib"] for line in read_metrics(run)]
        for run in (undisturbed_workdir, workdir)
    ]
    lines, expected_lines = (
        [*map(noise.steady, read_metrics(run))] for run in (workdir, undisturbed_workdir)
    )
    weight_difference = difference(workdir, undisturbed_workdir)
    is_equal = lines == expected_lines and weight_difference == 0.0
    result = {
        "updates": len(lines),
        "starts": number,
        "faults": dict(faults),
        "statuses": {str(code): times for code, times in statuses.items()},
        "hours": (time.monotonic() - clock) / 3600,
        "equal_bits": is_equal,
        "largest_difference": weight_difference,
        "resident_mib": {
            "whole": [max(memory[0][:50]), max(memory[0][-50:])],
            "disturbed": [max(memory[1][:50]), max(memory[1][-50:])],
        },
    }
    print(json.dumps(result))
    return 0 if (weight_difference < 1e-5 if options.moves else is_equal) else 1


if __name__ == "__main__":
    sys.exit(main())
