"""A section of the accelerator benchmark whose cases fail in every way (test_accelerator.py)."""

import math
import os
import signal
import sys
import time

import jax.numpy as jnp

from benchmarks.accelerator.section import FAULT, Case


def cases(setting):
    played = setting.out / "played"

    def count() -> dict[str, float]:
        with played.open("a") as file:
            file.write(".")
        return {"sum": float(jnp.sum(jnp.ones(3)))}

    def crash() -> None:
        print("about to crash", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)

    def refuse() -> None:
        count()
        raise ValueError("a shape that\nno kernel has")

    return [
        Case("good", count),
        Case("raises", refuse),
        Case("unprepared", count, prepare=lambda: 1 / 0),
        Case("faulty", lambda: {"error": 2.0, FAULT: "error 2, must be at most 1"}),
        Case("unwritable", lambda: {"path": setting.out}),
        Case("exits", lambda: sys.exit(3)),
        Case("exact", lambda: {"numbers": [math.nan, math.inf, 0.5]}),
        Case("crashes", crash),
        Case("crashes_early", count, prepare=crash),
        Case("hangs", lambda: time.sleep(60), limit=0.5),
        Case("last", count),
    ]
