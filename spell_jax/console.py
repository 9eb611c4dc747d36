"""Console scripts: `spell-train` is `python -m spell_jax.train`, and so on (setup.py)."""

from __future__ import annotations

import functools
import runpy


def _run(module: str) -> None:
    # As "__main__": the modules define their flags only there, and console scripts need them too.
    runpy.run_module(f"spell_jax.{module}", run_name="__main__", alter_sys=True)


train = functools.partial(_run, "train")
sft = functools.partial(_run, "sft")
generate = functools.partial(_run, "generate")
serve = functools.partial(_run, "serve")
evaluate = functools.partial(_run, "evaluate")
export = functools.partial(_run, "export")
report = functools.partial(_run, "report")
check = functools.partial(_run, "launch.check")
plan = functools.partial(_run, "launch.plan")
