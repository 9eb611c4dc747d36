"""A small algorithm on a mesh of four devices, in one process or as one of two processes.

python -m tests.rollout.hosts PORT PROCESS        # prints the replies as JSON
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

DEVICES = 4
MESH = {"data": 2, "fsdp": 1, "context": 2}


def run() -> list[Any]:
    """Return the replies to each coroutine, in the order in which the coroutines ended."""
    import jax

    from spell_jax.policy import transformer
    from spell_jax.rollout.text_model import TextSampler
    from spell_jax.rollout.worker import RolloutWorker
    from spell_jax.runtime import mesh as meshes
    from spell_jax.sampler.config import SamplerConfig
    from spell_jax.sampler.engine import Sampler
    from tests import tiny

    mesh = meshes.make_mesh(MESH, jax.devices()[:DEVICES])
    config = SamplerConfig(
        max_tokens=12,
        max_prompt=16,
        page_size=4,
        kv_cache_tokens=512,
        slots=4,
        samples_per_prompt_batch=2,
        prefill_tokens=16,
        decode_tokens=3,
        speculative_tokens=2,
    )
    sampler = Sampler(tiny.POLICY, config, (5,), mesh)
    shapes, axes = transformer.abstract_params(tiny.POLICY)
    params = meshes.device_put(tiny.weights(), meshes.shardings(mesh, axes, shapes))
    tokenizer: Any = SimpleNamespace(
        chat=lambda text: [3 + ord(letter) % 60 for letter in text],
        decode=lambda ids: " ".join(map(str, ids)),
        open_thought=lambda text: "",
    )
    worker = RolloutWorker(TextSampler(sampler, tokenizer), jax.random.key(0))
    worker.start_step(1, {"policy": params, "reference_reader": params})
    replies_by_coroutine = []

    async def ask_models(ask, text: str) -> None:
        first = await ask("responder", [text], 2)
        second = await ask("responder", ["x" + text[::-1]], model="reference_reader")
        third = await ask("verifier", [text, text[:3]], 3, max_tokens=4)
        replies_by_coroutine.append(
            [text, *(reply and list(reply.texts) for reply in (*first, *second, *third))]
        )

    worker.run_all(ask_models, ["abcdefgh"[:k] + "zq" * (k % 3) for k in range(1, 9)] + ["y" * 17])
    return replies_by_coroutine


def main() -> None:
    port, process = sys.argv[1:]
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES // 2}"
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, int(process))
    print(json.dumps(run()))


if __name__ == "__main__":
    main()
