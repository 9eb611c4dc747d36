"""The demo: SPELL in the generated world, from the small policy that ships with the package.

    python -m spell_jax.train --config=configs/tiny.py --workdir=runs/demo

Hardware: 2 CPU cores, 15 minutes, of which at most 10 are self-play. Expected scores: README,
section "Results". What departs from the paper's recipe, which decays at this size: a frozen
reader gives the references and their contexts stay small, options are distinct, the verifier is
trained on twice as many groups, and an update uses the questions with mixed rewards of one round of
48 proposals (about 12) instead of running rounds until it has a fixed number of them.
"""

from typing import Any

from spell_jax.config import default_config


def get_config() -> Any:  # a ConfigDict, whose fields have no static types
    config = default_config()
    config.steps = 120
    config.evaluate = True
    config.validate_every = 20
    config.checkpoint_every = 20
    config.max_minutes = 10.0

    config.policy.folder = "tiny"
    config.policy.compute_dtype = "float32"
    config.policy.remat = "none"

    config.data.source = "tiny"

    config.algorithm.prompts = "compact"
    config.algorithm.questions = 48
    config.algorithm.generation_batch = 48
    config.algorithm.max_generations = 1
    config.algorithm.documents = (2,)
    # The questioner, and so the frozen reader, never reads more than 2 (1 + 1) of the documents:
    # references from more are the responder's own opinion, and teach it nothing.
    config.algorithm.memory = 1
    config.algorithm.memory_documents = "new"
    config.algorithm.reference_source = "frozen_reader"
    config.algorithm.distinct_options = True
    config.algorithm.verifier_share = 0.25

    config.sampler.max_prompt = 192
    config.sampler.page_size = 32
    config.sampler.kv_cache_tokens = 32_768
    config.sampler.slots = 128
    config.sampler.prefill_tokens = 1536
    config.sampler.decode_tokens = 16
    config.sampler.max_tokens = 48
    config.sampler.max_verdict_tokens = 4

    config.optimizer.learning_rate = 2e-4
    config.optimizer.b2 = 0.95
    config.packing.buckets = ((320, 224),)
    config.packing.token_budget = 6400
    return config
