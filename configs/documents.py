"""Self-play of SmolLM2-135M on your own documents, after a format stage on them.

    python -m spell_jax.train --config=configs/documents.py --workdir=runs/documents/run

docs/howto/real_model.md has the commands that make the files under runs/documents. The algorithm is
the arm "spell" of configs/real.py: a rule chooses a name or a number as the answer, the policy
writes the question, and then answers it from all documents of the cluster. A rule compares.
Hardware: 2 CPU cores. Half of the batch of configs/real.py, because an update should take minutes.
"""

from spell_jax.configs import real
from spell_jax.runtime.config import Config


def get_config() -> Config:
    config = real.get_config("spell")
    config.update(steps=40, validate_every=20)
    config.policy.folder = "runs/documents/start/policy"
    # The share that question_sets.facts holds out by default, so the same clusters.
    config.data.update(source="runs/documents/clusters", held_out=0.05, shuffle=True)
    config.data.validation = "runs/documents/rows/questions.jsonl"
    config.algorithm.update(questions=16, generation_batch=16)
    config.algorithm.questioner.questions_per_cluster = 4
    config.sampler.max_prompt = 2048
    return config
