"""The process of one side of the section `step`: python -m benchmarks.accelerator.step_side SIDE.

1. SIDE is "ours", "trl" or "generate". The process imports its libraries, which touches no device,
   and then waits for a line of JSON on its standard input, the options. Imports thus run while
   another side measures.
2. Its standard output has one line of JSON, the numbers, or "error" with a text. Whatever libraries
   print goes to the standard error, the section's log.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from benchmarks.sides import contract
from benchmarks.sides.trl import make_model, train

Measurement = Callable[[dict[str, Any]], dict[str, Any]]
_PREFILLS = 2  # timed, the fastest counts


def _import_ours() -> Measurement:
    from benchmarks.peers import play_ours
    from spell_jax.runtime import setup

    def measure(options: dict[str, Any]) -> dict[str, Any]:
        setup.setup()
        return play_ours(options)

    return measure


def _import_trl() -> Measurement:
    import datasets
    import torch

    trl: Any = importlib.import_module("trl")  # type checkers do not know its exports
    assert datasets and torch and trl.GRPOTrainer  # imported on access
    return lambda options: dataclasses.asdict(train(contract.SideOptions(**options)))


def _import_generate() -> Measurement:
    import torch
    import transformers

    assert torch and transformers.AutoModelForCausalLM  # imported on access
    return lambda options: _generate(contract.SideOptions(**options))


def _generate(options: contract.SideOptions) -> dict[str, Any]:
    """Time transformers' `generate` for G answers to each prompt; it repeats prompts G times."""
    import torch

    model = make_model(options.policy, options.dtype, options.gpu).eval()
    torch.manual_seed(0)
    ids = torch.randint(options.vocab, (options.groups, options.prompt), device=model.device)

    def seconds_of(tokens: int) -> float:
        clock = time.perf_counter()
        rows = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_return_sequences=options.group,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
            eos_token_id=None,
            do_sample=True,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            disable_compile=True,
        )
        if options.gpu:
            torch.cuda.synchronize()
        assert rows.shape == (options.groups * options.group, options.prompt + tokens)
        return time.perf_counter() - clock

    first = seconds_of(4)  # loads kernels, and is not timed
    prefill = min(seconds_of(1) for _ in range(_PREFILLS))
    generate: list[float] = []
    while len(generate) < options.steps and sum(generate) <= options.seconds:
        generate.append(seconds_of(options.response))
    return {
        "first_s": first,
        "prefill_s": prefill,
        "generate_s": generate,
        "parameters": sum(leaf.numel() for leaf in model.parameters()),
        "peak_bytes": torch.cuda.max_memory_allocated() if options.gpu else contract.peak_bytes(),
    }


_IMPORTS = {"ours": _import_ours, "trl": _import_trl, "generate": _import_generate}


def main(side: str) -> None:
    # Libraries print to file descriptor 1, also from C++. It becomes the standard error, and the
    # line goes to a copy of the first standard output.
    line = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    measure, reason = None, ""
    try:
        measure = _IMPORTS[side]()
    except Exception as error:
        reason = _text_of(error)
    text = sys.stdin.readline()
    if not text:  # the section ended before this side's turn
        return
    numbers: dict[str, Any] = {}
    if measure:
        try:
            numbers = measure(json.loads(text))
        except Exception as error:
            reason = _text_of(error)
    line.write(json.dumps({"error": reason} if reason else numbers) + "\n")
    line.flush()
    sys.stderr.flush()
    os._exit(0)  # without waiting for threads and destructors of libraries


def _text_of(error: BaseException) -> str:
    """Format an exception as one line of text; print its traceback to the log."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


if __name__ == "__main__":
    main(sys.argv[1])
