"""SmolLM2-135M on your own documents, after a format stage on them.

    python -m spell_jax.train --config=configs/documents.py --workdir=runs/documents/run
    python -m spell_jax.train --config=configs/documents.py:spell --workdir=runs/documents/spell

docs/howto/real_model.md has the commands that make the files under runs/documents. By default,
RLVR trains on questions that rules make, with right answers. With `spell`, a rule chooses a name or
a number as the answer, and the policy writes the question (the arm "spell" of configs/real.py).
Both compare answers by a rule.
Hardware: 2 CPU cores.
"""

from spell_jax.configs import real
from spell_jax.runtime.config import Config

ARMS = {"rules": "labelled", "spell": "spell"}  # argument -> arm of configs/real.py


def get_config(name: str = "rules") -> Config:
    if name not in ARMS:
        raise ValueError(f"configs/documents.py:{name}: must be one of {', '.join(ARMS)}")
    config = real.get_config(ARMS[name])
    config.update(steps=20, validate_every=10)
    config.policy.folder = "runs/documents/start/policy"
    # The share that question_sets.facts holds out by default, so the same clusters.
    config.data.update(source="runs/documents/clusters", held_out=0.05, shuffle=True)
    config.data.validation = "runs/documents/rows/questions.jsonl"
    if name == "rules":
        config.data.questions = "runs/documents/rows/training_questions.jsonl"
    else:  # half of the batch of configs/real.py, because an update should take minutes
        config.algorithm.update(questions=16, generation_batch=16)
    config.algorithm.questioner.questions_per_cluster = 4
    config.sampler.max_prompt = 2048
    return config
