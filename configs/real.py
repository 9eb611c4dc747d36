"""A pretrained model that trains without labels: methods and controls as arms of one table.

    python -m spell_jax.train --config=configs/real.py:ARM --workdir=runs/real/ARM_SEED \
        --config.seed=SEED

ARM is one of ARMS. The policy begins after configs/format_stage.py, with rows that teach the forms
of the arm. docs/without_labels.md has the protocol, the commands that make the files under
runs/real, and the results.
Hardware: 2 CPU cores, one to two hours for 100 updates of a policy of 135M parameters.
"""

from collections.abc import Mapping
from typing import Any

from spell_jax.config import default_config
from spell_jax.runtime.config import Config

# Eight questions about eight paragraphs of an article, which pack as one tree.
_QUESTIONS = {
    "data.source": "runs/real/articles8.jsonl",
    "data.validation": "runs/real/held_out.jsonl",
    "data.shuffle": False,
    "algorithm.generation_batch": 32,
    "algorithm.questioner.questions_per_cluster": 8,
}
_EXACT = {
    **_QUESTIONS,
    "algorithm.max_generations": 1,
    "algorithm.questions": 32,
    "algorithm.responder.reward": "rule",
    "algorithm.rule": "exact",
}
_RLVR = {"algorithm.name": "rlvr", **_EXACT}
_CLOZE = {"data.tasks": ("cloze",), "data.questions": "runs/real/cloze.jsonl"}
_WH = {"data.questions": "runs/real/wh_questions.jsonl"}
# A rule chooses the answer, and the questioner reads one paragraph and writes a question.
_ANSWER_FIRST = {"algorithm.questioner.documents": (1,), "algorithm.questioner.answer_first": True}
# The start must find the answer there in four of four samples.
_CONFIRMED = {"algorithm.reader.source": "confirmed", "algorithm.reader.unanimous": True}
# What the start answers there in all of four samples is the reference.
_AGREED = {"algorithm.reader.source": "frozen_reader", "algorithm.reader.unanimous": True}
# The teacher is the start, which reads the paragraph that a question was written from.
_TAUGHT = {
    **_QUESTIONS,
    "algorithm.name": "self_distillation",
    "algorithm.generation_batch": 16,
    "loss.distillation_weight": 1.0,
    "loss.kl_weight": 0.0,
}
# Arm -> changed fields.
ARMS: Mapping[str, Mapping[str, Any]] = {
    # Controls: people's questions with their right answers, and with random rewards.
    "labelled": {**_RLVR, "data.questions": "runs/real/labelled.jsonl"},
    "random": {
        **_RLVR,
        "data.questions": "runs/real/labelled.jsonl",
        "algorithm.responder.reward": "random",
    },
    # Sentences with a gap that rules find; their answers stand in the documents.
    "cloze": {**_RLVR, **_CLOZE},
    # Sentences with a question word that rules choose; they stay in the documents.
    "wh": {**_RLVR, **_WH},
    # Half of the reward is for the number of a paragraph in which the answer stands.
    "cloze_evidence": {
        **_RLVR,
        **_CLOZE,
        "algorithm.responder.document_share": 0.5,
        "policy.folder": "runs/real/start_numbers/policy",
    },
    # The same gaps chosen by the questioner, which is rewarded for their difficulty.
    "cloze_spell": {
        **_EXACT,
        "data.tasks": ("cloze",),
        "algorithm.questioner.documents": (2,),
        "policy.folder": "runs/real/start_gaps/policy",
    },
    # Self-play on answers that a rule chooses.
    "spell": {**_EXACT, **_ANSWER_FIRST},
    # The same with questions that the start answers, and the static control.
    "answer_first": {**_EXACT, **_ANSWER_FIRST, **_CONFIRMED},
    "answer_first_static": {**_RLVR, **_ANSWER_FIRST, **_CONFIRMED},
    # A reader of one paragraph gives the references of a responder that reads eight.
    "reader": {**_EXACT, **_ANSWER_FIRST, **_AGREED},
    "reader_static": {**_RLVR, **_ANSWER_FIRST, **_AGREED},
    # The start, reading one paragraph, teaches the policy, which reads eight. The start also writes
    # the questions; their references are not used.
    "distillation": {**_TAUGHT, **_ANSWER_FIRST},
    # The same with gaps that rules find.
    "distillation_cloze": {**_TAUGHT, **_CLOZE},
    # The same with sentences with a question word.
    "distillation_wh": {**_TAUGHT, **_WH},
    # The same with people's questions; their answers are not read.
    "distillation_asked": {**_TAUGHT, "data.questions": "runs/real/asked.jsonl"},
    # Paragraphs of books go back to where they were; a fifth of the books are held out.
    "reconstruction": {
        "algorithm.name": "reconstruction",
        "algorithm.documents": 16,
        "algorithm.options": (3, 4),
        "algorithm.option_weights": (1.0, 1.0),
        "algorithm.max_paragraph": 1000,
        "algorithm.cut_documents": True,
        "algorithm.keep_equal": False,
        "algorithm.validation_puzzles": 32,
        "data.source": "runs/real/books",
        "data.documents_per_cluster": 1,
        "data.max_document_tokens": 1_000_000,
        "data.held_out": 0.2,
        "sampler.max_prompt": 1024,
        "policy.folder": "runs/real/start_orders/policy",
    },
}


def get_config(arm: str = "distillation") -> Config:
    if arm not in ARMS:
        raise ValueError(f"configs/real.py:{arm}: must be one of {', '.join(ARMS)}")
    config = default_config(ARMS[arm].get("algorithm.name", "spell"))
    config.update(steps=100, evaluate=True, validate_every=50, checkpoint_every=10)
    config.preemption_limit_s = 600.0
    config.policy.folder = "runs/real/start/policy"
    config.policy.remat = "none"  # a micro-batch takes 9 GiB
    config.data.update(tasks=("general_qa",), task_weights=(1.0,))  # SQuAD's answers are texts
    config.algorithm.update(prompts="compact", group_size=8)
    config.sampler.update(max_prompt=4000, max_tokens=32, page_size=64, kv_cache_tokens=131_072)
    # A token's gradient belongs to the distribution that sampled it, here the full softmax.
    config.sampler.update(temperature=1.0, top_p=1.0, prefill_tokens=512, slots=128)
    config.sampler.update(decode_tokens=16)
    # Right labels help at 3e-5 (+.055 after 50 updates), and do not at 5e-6 (-.008).
    config.optimizer.update(learning_rate=3e-5, b2=0.95, weight_decay=0.0, warmup_steps=5)
    config.loss.update(kl_weight=1e-3)
    config.packing.update(token_budget=4096)
    config.update_from_flattened_dict(ARMS[arm])
    return config
