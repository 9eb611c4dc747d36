"""SPELL from Qwen2.5-7B-Instruct: the paper's hyper-parameters.

    python -m spell_jax.train --config=configs/qwen2_5_7b_instruct.py --workdir=DIR \
        --config.policy.folder=FOLDER --config.data.source=DOCUMENTS

FOLDER is a local copy of Qwen/Qwen2.5-7B-Instruct (Hugging Face), by default
models/Qwen2.5-7B-Instruct; DOCUMENTS are yours (README, "Your own documents").
Hardware: weights, gradient, optimizer and the copy that plays take 18 bytes for each of the 7.6e9
parameters, 137 GB (estimated), split over all devices.
The paper's own run took 8 hours on 8 A100 of 80 GB (section F.1).
Expected, as the paper reports (Table 1; nothing of it was run with this code): average of four
benchmarks 38.2 before and 47.2 after, with inputs of up to 16K tokens.
"""

from typing import Any

from configs import base


def get_config() -> Any:  # a ConfigDict, whose fields have no static types
    config = base.get_config()
    config.policy.folder = "models/Qwen2.5-7B-Instruct"
    return config
