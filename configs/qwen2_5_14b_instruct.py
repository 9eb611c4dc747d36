"""SPELL from Qwen2.5-14B-Instruct: the paper's hyper-parameters.

    python -m spell_jax.train --config=configs/qwen2_5_14b_instruct.py --workdir=DIR \
        --config.policy.folder=FOLDER --config.data.source=DOCUMENTS

FOLDER is a local copy of Qwen/Qwen2.5-14B-Instruct (Hugging Face), by default
models/Qwen2.5-14B-Instruct; DOCUMENTS are yours (README, "Your own documents").
Hardware: weights, gradient, optimizer and the copy that plays take 18 bytes for each of the 14.8e9
parameters, 266 GB (estimated), split over all devices.
Expected, as the paper reports (Table 1; nothing of it was run with this code): average of four
benchmarks 50.8 before and 57.8 after, with inputs of up to 16K tokens.
"""

from typing import Any

from configs import qwen2_5_7b_instruct


def get_config() -> Any:  # a ConfigDict, whose fields have no static types
    config = qwen2_5_7b_instruct.get_config()
    config.policy.folder = "models/Qwen2.5-14B-Instruct"
    return config
