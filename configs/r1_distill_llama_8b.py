"""SPELL from DeepSeek-R1-Distill-Llama-8B: the paper's values, 20K tokens an answer.

    python -m spell_jax.train --config=configs/r1_distill_llama_8b.py --workdir=DIR \
        --config.policy.folder=FOLDER --config.data.source=DOCUMENTS

FOLDER is a local copy of deepseek-ai/DeepSeek-R1-Distill-Llama-8B (Hugging Face), by default
models/DeepSeek-R1-Distill-Llama-8B; DOCUMENTS are yours (README, "Your own documents").
Hardware: weights, gradient, optimizer and the copy that plays take 18 bytes for each of the 8.0e9
parameters, 145 GB (estimated), split over all devices.
Expected, as the paper reports (Table 1; nothing of it was run with this code): average of four
benchmarks 46.8 before and 50.2 after, with inputs of up to 16K tokens.
"""

from typing import Any

from configs import qwen3_4b_thinking


def get_config() -> Any:  # a ConfigDict, whose fields have no static types
    config = qwen3_4b_thinking.get_config()
    config.policy.folder = "models/DeepSeek-R1-Distill-Llama-8B"
    return config
