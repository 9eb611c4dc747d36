"""Check the rules of the house, or measure its size.

    python -m tests.house [--measure | --measure-step [--files]]

Prints one `file:line: rule: text` line per violation and exits with 1 if there is any. --measure
prints the size of the import picture and counts of words and lines instead. --measure-step runs a
tiny SPELL training and prints what one step crosses (tests/house_step.py), with --files each file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests import house_measures, house_rules

ARGUMENTS = [[], ["--measure"], ["--measure-step"], ["--measure-step", "--files"]]


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit code."""
    if list(arguments) not in ARGUMENTS:
        print(f"arguments {[*arguments]}: must be one of {ARGUMENTS}", file=sys.stderr)
        return 2
    if "--measure-step" in arguments:
        # Only here: the check must not wait for jax.
        from tests import house_step

        print(*house_step.measure(house_step.record_step(), "--files" in arguments), sep="\n")
        return 0
    sources, pages = house_rules.read()
    if arguments:
        for name, count in house_measures.measure(sources, pages).items():
            print(f"{count:>8,}  {name}")
        return 0
    violations = house_rules.check(sources, pages)
    for violation in violations:
        print(violation)
    if violations:
        print(f"{len(violations)} violations of the house rules", file=sys.stderr)
    return int(bool(violations))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
