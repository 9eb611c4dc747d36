"""SPELL from SmolLM2-135M after its cold start, on real documents without labels.

    DATA=folder with edgar, books and gov_speeches; SQUAD=dev-v1.1.json
    python -m data_pipeline.article_questions --rows=$SQUAD --articles=9-16 \
        --clusters=runs/smollm2/articles.jsonl
    python -m data_pipeline.build --config=configs/data/smollm2.py:$DATA --out=runs/smollm2/clusters
    python -m data_pipeline.article_questions --rows=$SQUAD --articles=17-24 --paragraphs=4 \
        --sets=2 --per_article=30 --out=runs/smollm2/held_out_4.jsonl
    python -m data_pipeline.article_questions --rows=$SQUAD --articles=17-24 --paragraphs=8 \
        --sets=1 --per_article=15 --seed=1 --out=runs/smollm2/held_out_8.jsonl
    cat runs/smollm2/held_out_[48].jsonl > runs/smollm2/held_out.jsonl
    python -m data_pipeline.article_questions --rows=$SQUAD --articles=9-16 --paragraphs=2 \
        --per_article=60 --out=runs/smollm2/labelled.jsonl  # for the arm "labelled" alone
    python -m spell_jax.train --config=configs/smollm2.py --workdir=runs/smollm2/spell

The cold start (configs/smollm2_cold_start.py) comes first. The documents are filings, books,
speeches, and the paragraphs of articles without their questions. The policy is measured before and
after on people's questions about articles that neither stage has seen, with four and eight
paragraphs. --config=configs/smollm2.py:ARM is one of ARMS: SPELL, its controls, SPELL with better
references, and RLVR with labels. Hardware: 2 CPU cores; time and accuracies: docs/smollm2.md.
"""

from collections.abc import Mapping
from typing import Any

from spell_jax.config import default_config
from spell_jax.runtime.config import Config

# RLVR: a step without proposals and verdicts samples so little that 16 questions are as fast as 8.
_RLVR = {
    "algorithm.name": "rlvr",
    "algorithm.questions": 16,
    "algorithm.questions_per_cluster": 1,
    "algorithm.responder_reward": "rule",
}
_GENERAL = {"data.tasks": ("general_qa",), "data.task_weights": (1.0,)}
# Arm -> changed fields.
ARMS: Mapping[str, Mapping[str, Any]] = {
    "spell": {},
    "frozen": {"algorithm.train_questioner": False},
    "random": {"algorithm.responder_reward": "random"},
    # Most of the questioner's references are wrong (docs/smollm2.md): a frozen reader's, where all
    # of its answers agree, and only the task of which a fair part was right.
    "reader": {
        "algorithm.reference_source": "frozen_reader",
        "algorithm.reader_unanimous": True,
        **_GENERAL,
    },
    # The cold-started policy's own questions, each about other documents, written once.
    "rlvr": {**_RLVR, "algorithm.static_questions": 240},
    # People's questions about the articles whose paragraphs the other arms read without them: what
    # right references are worth.
    "labelled": {
        **_RLVR,
        **_GENERAL,
        "data.source": "",
        "data.questions": "runs/smollm2/labelled.jsonl",
    },
}


def get_config(arm: str = "spell") -> Config:
    if arm not in ARMS:
        raise ValueError(f"configs/smollm2.py:{arm}: must be one of {', '.join(ARMS)}")
    config = default_config(ARMS[arm].get("algorithm.name", "spell"))
    # An update takes minutes on a CPU; a run that is told to stop gets the time to end it.
    config.update(steps=100, evaluate=True, validate_every=10, checkpoint_every=5)
    config.preemption_limit_s = 600.0
    config.policy.update(compute_dtype="float32", remat="none")
    config.policy.folder = "runs/smollm2/cold_start/policy"
    config.data.source = "runs/smollm2/clusters"
    config.data.validation = "runs/smollm2/held_out.jsonl"
    config.data.max_document_tokens = 160

    config.algorithm.update(prompts="compact", questions=8, generation_batch=16)
    config.algorithm.update(max_generations=2, documents=(2,), verifier_group_size=4)
    config.algorithm.questions_per_cluster = 4  # proposals about documents that are read once

    config.sampler.update(max_prompt=2048, max_tokens=128, max_verdict_tokens=8)
    config.sampler.update(page_size=64, kv_cache_tokens=98_304, decode_tokens=32)
    # A step has few short prompts: with 2048 and 64, a rollout took 96 s instead of 81 s.
    config.sampler.update(prefill_tokens=512, slots=32)
    config.optimizer.update(learning_rate=5e-5, b2=0.95)
    config.packing.update(buckets=((512, 256), (1024, 512), (2304, 1024)), token_budget=2304)
    config.update_from_flattened_dict(ARMS[arm])
    return config
