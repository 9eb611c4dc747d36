"""Draws and prints what runs measured, and writes a page about it.

    python -m spell_jax.report --workdir=DIR[,DIR,...] [--x=sampled_tokens]

1. The held-out evaluation is printed, with 95 % intervals, and the paired differences of answers
   to questions of a file.
2. DIR/report.html shows what was run, the evaluation and the metrics on one page, with episodes to
   browse. Each of its plots is a picture in DIR/plots too, for a column of a paper.
3. Several runs are compared: the page is comparison.html in the first folder, and its pictures are
   in plots/comparison there.
4. With --x=sampled_tokens the curves of a page are plotted over the tokens that all roles have
   sampled so far, so that algorithms are compared at equal cost of sampling.
"""

from __future__ import annotations

import argparse

from spell_jax.reporting.page import X_AXES
from spell_jax.runtime import entry
from spell_jax.runtime.files import paths


def main() -> None:
    description = "Draws and prints what runs measured."
    parser = argparse.ArgumentParser("python -m spell_jax.report", description=description)
    parser.add_argument("--workdir", required=True, help="folder of the run, or A,B,... to compare")
    parser.add_argument("--x", choices=X_AXES, default="step", help="x axis of the curves")
    arguments = parser.parse_args()
    from spell_jax.reporting import run_report  # with matplotlib, which --help does not wait for

    names = arguments.workdir.split(",")
    if not all(map(str.strip, names)):
        raise ValueError(f"--workdir = {arguments.workdir!r}: must be folders, none of them ''")
    run_report.report_runs([paths.open_folder(name) for name in names], arguments.x)


if __name__ == "__main__":
    with entry.user_errors():
        main()
