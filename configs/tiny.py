"""The demo: SPELL in the generated world, from the small policy that ships with the package.

    python -m spell_jax.train --config=configs/tiny.py --workdir=runs/demo

--config=configs/tiny.py:NAME trains another algorithm on questions, such as rlvr, with the values
of the fields that both have, and with the loss that NAME needs.

Hardware: 2 CPU cores. Minutes and expected scores: docs/results.md. What departs from the paper's
recipe, which decays at this size: a frozen reader gives the references and their contexts stay
small, options are distinct, the verifier is trained on twice as many groups, the questioner's
advantages are normalized per task, and an update uses the questions with mixed rewards of one round
of 48 proposals (about 12), where the paper runs rounds until an update has 128 questions.
"""

from spell_jax.config import change_algorithm, default_config
from spell_jax.runtime.config import Config

_PAIRS = {"objective": "dpo", "old_logprobs": "reference", "aggregation": "sequence_mean"}
_LOSSES = {
    "self_distillation": {"distillation_weight": 1.0},
    "longpo": _PAIRS | {"nll_weight": 1.0},
    "solopo": _PAIRS | {"align_weight": 1.0},
}


def get_config(algorithm: str = "spell") -> Config:
    config = default_config()
    config.update(steps=120, evaluate=True, validate_every=20, checkpoint_every=20)
    config.max_minutes = 10.0  # bounds the demo on a slow machine
    # Activations of this policy fit into memory, so recomputing them would only cost time.
    config.policy.update(folder="tiny", remat="none")
    config.data.source = "tiny"

    config.algorithm.update(prompts="compact", questions=48, generation_batch=48, max_generations=1)
    questioner, verifier = config.algorithm.questioner, config.algorithm.verifier
    questioner.documents = (2,)
    # The questioner, and so the frozen reader, never reads more than 2 (1 + 1) of the documents:
    # references from more are the responder's own opinion, and teach it nothing.
    questioner.update(memory=1, memory_solved=True, distinct_options=True)
    config.algorithm.reader.source = "frozen_reader"
    questioner.normalization = "task"  # a hard task is not punished
    # The demo's numbers were measured without ties and without malformed votes as a conflict.
    verifier.update(share=0.25, conflict="well_formed")

    # A verdict has 2 tokens, and an answer 21.
    config.sampler.update(max_prompt=192, max_tokens=48, slots=128)
    verifier.max_tokens = 4
    # Prompts share whole pages only, so a page must not be longer than a question.
    config.sampler.update(page_size=16, kv_cache_tokens=32_768)
    config.sampler.update(prefill_tokens=1536, decode_tokens=16)
    # The paper's rate of 2e-6 is for models of 4B parameters and more. With 120 updates, the second
    # moment must not average over 1,000 (b2 of .999), but over 20.
    config.optimizer.update(learning_rate=2e-4, b2=0.95)
    # 5 rows a micro-batch: 83 % of the tokens are no padding, with 20 rows 68 % (20 steps).
    # SoLoPO's rows hold the chosen answer twice, after its short prompt and after all documents.
    bucket = (480, 240) if algorithm == "solopo" else (320, 224)
    config.packing.update(buckets=(bucket,), token_budget=1600)
    change_algorithm(config, algorithm)
    config.loss.update(_LOSSES.get(algorithm, {}))
    return config
