"""The demo of document reconstruction: the lines of generated stories go back to where they were.

    python -m spell_jax.sft --config=configs/tiny_reconstruction_warm_start.py \
        --workdir=runs/tiny_reconstruction_warm_start
    python -m spell_jax.train --config=configs/tiny_reconstruction.py \
        --workdir=runs/tiny_reconstruction

"""

from typing import Any

from configs import reconstruction, tiny
from spell_jax.data.tiny_stories import SHORTEST_LINE


def get_config() -> Any:  # a ConfigDict, whose fields have no static types
    config = tiny.get_config()
    config.steps = 60
    config.max_minutes = 0.0
    config.policy.folder = "runs/tiny_reconstruction_warm_start/policy"

    config.data.source = "tiny_stories"
    config.data.tiny.clusters = 512
    config.data.tiny.documents = (5, 6, 7)  # lines of a story
    config.data.tasks = ("general_qa",)
    config.data.task_weights = (1.0,)

    config.game = reconstruction.game()
    config.game.prompts = "compact"
    config.game.evaluation_puzzles = 128
    config.game.documents = 16
    config.game.options = (2, 3, 4)
    config.game.option_weights = (3.0, 3.0, 5.0)  # of the most options most, as in the paper
    config.game.min_paragraph = SHORTEST_LINE

    config.sampler.temperature = 1.0
    config.sampler.top_p = 1.0
    config.sampler.max_prompt = 96
    config.sampler.max_tokens = 40
    config.optimiser.learning_rate = 1e-4
    config.packing.buckets = ((320, 256),)
    config.packing.token_budget = 2560
    return config
