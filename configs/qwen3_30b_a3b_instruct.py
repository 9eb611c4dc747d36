"""SPELL from Qwen3-30B-A3B-Instruct-2507: the paper's hyper-parameters.

    python -m spell_jax.train --config=configs/qwen3_30b_a3b_instruct.py --workdir=DIR \
        --config.policy.folder=FOLDER --config.data.source=DOCUMENTS

FOLDER is a local copy of Qwen/Qwen3-30B-A3B-Instruct-2507 (Hugging Face), by default
models/Qwen3-30B-A3B-Instruct-2507; DOCUMENTS are yours (README, "Your own documents").
Hardware: weights, gradient, optimizer and the copy that plays take 18 bytes for each of the 30.5e9
parameters, 550 GB (estimated), split over all devices; a multiple of 8.
Expected, as the paper reports (Table 1; nothing of it was run with this code): average of four
benchmarks 56.3 before and 60.7 after, with inputs of up to 16K tokens.
"""

from typing import Any

from configs import base


def get_config() -> Any:  # a ConfigDict, whose fields have no static types
    config = base.get_config()
    config.policy.folder = "models/Qwen3-30B-A3B-Instruct-2507"
    # Experts, and with them the rows of all other layers, are split over 8 devices.
    config.mesh.expert = 8
    return config
