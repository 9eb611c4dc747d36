"""Print a table or figure of the papers: its commands, or its numbers here beside the paper's.

    python -m launch.experiments                       lists all experiments
    python -m launch.experiments NAME --commands [--workdir=DIR] [--inputs=DIR]
    python -m launch.experiments NAME --workdir=DIR

1. `python -m launch.xmanager --experiment=NAME --workdir=DIR` trains the rows, each in a folder of
   DIR. --commands prints the same runs as commands of spell_jax.train, then those that evaluate.
2. Without --commands the table is printed as Markdown. A cell is "paper / here". What the paper's
   text does not have, or no file of DIR, is blank.
3. Models, data and benchmarks are below --inputs (docs/experiments.md).
4. The rows and the paper's numbers are in launch/experiments/papers/*.toml.
"""

from __future__ import annotations

import argparse
import sys

from spell_jax.launch.experiments import printer, registry
from spell_jax.runtime import entry

WORKDIR = "runs/experiments"


def main() -> None:
    description = "Prints a table or figure of the papers."
    parser = argparse.ArgumentParser("python -m launch.experiments", description=description)
    parser.add_argument("name", nargs="?", help="name of the experiment; none: lists all")
    help_text = "print the commands that train and evaluate, not the table"
    parser.add_argument("--commands", action="store_true", help=help_text)
    parser.add_argument("--workdir", default=WORKDIR, help=f"folder of the runs ({WORKDIR})")
    parser.add_argument("--inputs", default=".", help="folder with models, data and benchmarks")
    options = parser.parse_args()
    if not options.name:
        print(printer.overviews())
        return
    experiment = registry.find(options.name)
    if options.commands:
        lines = printer.commands(experiment, options.workdir, options.inputs)
        for variable in printer.unset_variables(lines):
            # On stderr, so that the lines can be piped to a file or a shell.
            hint = f"export {variable}=http://HOST/v1 before the first command"
            print(f"{variable}: has no value; {hint}", file=sys.stderr)
        print("\n".join(lines))
        return
    rows = printer.table(experiment, options.workdir) if experiment.rows else ""
    print("\n\n".join(filter(None, (experiment.title, rows, experiment.note))))


if __name__ == "__main__":
    with entry.user_errors():
        main()
