"""SPELL from Qwen3-4B-Thinking-2507: the paper's values, 20K tokens an answer.

    python -m spell_jax.train --config=configs/qwen3_4b_thinking.py --workdir=DIR \
        --config.policy.folder=FOLDER --config.data.source=DOCUMENTS

FOLDER is a local copy of Qwen/Qwen3-4B-Thinking-2507 (Hugging Face), by default
models/Qwen3-4B-Thinking-2507; DOCUMENTS are yours (README, "Your own documents").
Hardware: weights, gradient, optimizer and the copy that plays take 18 bytes for each of the 4.0e9
parameters, 72 GB (estimated), split over all devices.
Expected, as the paper reports (Table 1; nothing of it was run with this code): average of four
benchmarks 54.5 before and 56.7 after, with inputs of up to 16K tokens.
"""

from typing import Any

from configs import base


def get_config() -> Any:  # a ConfigDict, whose fields have no static types
    config = base.get_config()
    config.policy.folder = "models/Qwen3-4B-Thinking-2507"
    # Reasoning models may write 20K tokens (paper section 4.1).
    config.sampler.max_tokens = 20_480
    config.sampler.max_verdict_tokens = 20_480
    return config
