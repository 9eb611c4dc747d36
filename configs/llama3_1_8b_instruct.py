"""SPELL from Llama-3.1-8B-Instruct: the paper's hyper-parameters.

    python -m spell_jax.train --config=configs/llama3_1_8b_instruct.py --workdir=DIR \
        --config.policy.folder=FOLDER --config.data.source=DOCUMENTS

FOLDER is a local copy of meta-llama/Meta-Llama-3.1-8B-Instruct (Hugging Face), by default
models/Meta-Llama-3.1-8B-Instruct; DOCUMENTS are yours (README, "Your own documents").
Hardware: weights, gradient, optimizer and the copy that plays take 18 bytes for each of the 8.0e9
parameters, 145 GB (estimated), split over all devices.
Expected, as the paper reports (Table 1; nothing of it was run with this code): average of four
benchmarks 40.1 before and 44.5 after, with inputs of up to 16K tokens.
"""

from typing import Any

from configs import base


def get_config() -> Any:  # a ConfigDict, whose fields have no static types
    config = base.get_config()
    config.policy.folder = "models/Meta-Llama-3.1-8B-Instruct"
    return config
