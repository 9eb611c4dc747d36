"""Fine-tuning of a policy on your own rows.

    python -m spell_jax.sft --config=configs/fine_tune.py --workdir=DIR \
        --config.policy.folder=FOLDER --config.source=ROWS.jsonl

FOLDER is hf://OWNER/NAME, a local folder, or "tiny"; docs/howto/fine_tune.md shows the rows.
A rate of 1e-5 for all weights and three epochs are common values for models of 0.5B parameters and
more, not measured here. The tiny policy needs about 3e-3. Adapters need more than all weights:
--config.policy.lora_rank=16 --config.optimizer.learning_rate=1e-4.
Hardware: a device of 18 bytes per parameter, and the activations of packing.token_budget tokens.
"""

from spell_jax.config import default_supervised_config
from spell_jax.runtime.config import Config


def get_config() -> Config:
    config = default_supervised_config()
    config.update(source="rows.jsonl", epochs=3.0, rows_per_step=16, log_every=1)
    config.policy.folder = "models/Qwen2.5-0.5B-Instruct"
    # A tenth of the steps at most: trainer/supervised.py shortens the warm-up of a short run.
    config.optimizer.update(learning_rate=1e-5, schedule="cosine", warmup_steps=20)
    config.packing.update(token_budget=4096)
    return config
