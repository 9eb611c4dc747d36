"""SPELL on one GPU of 24 or 80 GB, from an instruct model of 0.5B to 3B parameters.

    python -m spell_jax.train --config=configs/one_gpu.py:qwen2.5-1.5b-instruct-24gb-lora \
        --workdir=DIR --config.policy.folder=FOLDER --config.data.source=DOCUMENTS

The argument is one of RUNS: a model, the memory of the GPU, and -lora for adapters; without it all
weights are trained. FOLDER is hf://Qwen/NAME or a copy of the model's folder, by default
models/NAME; DOCUMENTS are yours (docs/howto/your_documents.md). docs/howto/one_gpu.md has planned
memory and estimated seconds of a step.
Hardware: each run is planned to fit the smallest GPU of its class, an L4 or an H100 (`python -m
launch.check --topology=l4:1`). None was run on such a GPU, and no scores are known.
"""

from typing import NamedTuple

from spell_jax.config import default_config
from spell_jax.runtime.config import Config


class GpuRun(NamedTuple):
    """One model on one GPU.

    Attributes:
      folder: name of the model's Hugging Face repository, without the owner.
      questions: number of questions of a step. The paper has 128, and here a step takes minutes.
      kv_cache_tokens: size of the page pool, a multiple of 2^17 that the GPU holds; with more, more
        answers are decoded at once.
      is_lora: whether adapters are trained instead of all weights, which take 18 bytes per
        parameter.
    """

    folder: str
    questions: int
    kv_cache_tokens: int
    is_lora: bool = False


_SMALL, _MIDDLE, _LARGE = (f"Qwen2.5-{size}-Instruct" for size in ("0.5B", "1.5B", "3B"))
RUNS = {
    "qwen2.5-0.5b-instruct-24gb": GpuRun(_SMALL, 16, 6 * 2**17),
    "qwen2.5-0.5b-instruct-24gb-lora": GpuRun(_SMALL, 16, 10 * 2**17, is_lora=True),
    "qwen2.5-1.5b-instruct-24gb-lora": GpuRun(_MIDDLE, 16, 4 * 2**17, is_lora=True),
    "qwen2.5-3b-instruct-24gb-lora": GpuRun(_LARGE, 16, 2 * 2**17, is_lora=True),
    "qwen2.5-0.5b-instruct-80gb": GpuRun(_SMALL, 64, 14 * 2**17),
    "qwen2.5-0.5b-instruct-80gb-lora": GpuRun(_SMALL, 64, 14 * 2**17, is_lora=True),
    "qwen2.5-1.5b-instruct-80gb": GpuRun(_MIDDLE, 64, 12 * 2**17),
    "qwen2.5-1.5b-instruct-80gb-lora": GpuRun(_MIDDLE, 64, 14 * 2**17, is_lora=True),
    "qwen2.5-3b-instruct-80gb": GpuRun(_LARGE, 64, 6 * 2**17),
    "qwen2.5-3b-instruct-80gb-lora": GpuRun(_LARGE, 64, 12 * 2**17, is_lora=True),
}


def get_config(name: str = "qwen2.5-0.5b-instruct-24gb") -> Config:
    if name not in RUNS:
        raise ValueError(f"configs/one_gpu.py:{name}: must be one of {', '.join(RUNS)}")
    run, config = RUNS[name], default_config()
    config.policy.folder = f"models/{run.folder}"
    config.update(validate_every=0, checkpoint_every=5)
    # Five documents of 3,000 tokens fit into a prompt of 16K with its question and instructions.
    config.data.update(documents_per_cluster=5, max_document_tokens=3000)
    config.algorithm.questioner.documents = (3,)
    # The paper has 480 proposals for 128 questions.
    config.algorithm.update(questions=run.questions, generation_batch=4 * run.questions)
    config.algorithm.max_generations = 2
    config.sampler.update(max_prompt=16_384, max_tokens=1024)
    config.sampler.kv_cache_tokens = run.kv_cache_tokens
    config.packing.token_budget = 16_384 + 8 * 1024  # a prompt with its 8 answers in one row
    if run.is_lora:
        config.policy.lora_rank = 16
        # 1e-4 is common for adapters, and unmeasured here.
        config.optimizer.learning_rate = 1e-4
    else:
        # Between the paper's rate for 4B parameters and more, 2e-6, and the 3e-5 at which a model
        # of 135M parameters learned (configs/real.py); unmeasured.
        config.optimizer.learning_rate = 5e-6
    return config
