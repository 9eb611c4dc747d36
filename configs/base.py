"""All fields of a run with the paper's values; every other config is a small delta of this one.

Not a run by itself: it has no policy and no documents. See tiny.py and folder.py.
"""

from typing import Any

from ml_collections import ConfigDict


def get_config() -> Any:  # a ConfigDict, whose fields have no static types
    config: Any = ConfigDict()
    config.seed = 0
    config.steps = 70  # updates of the run; the paper's runs are about this long
    config.validate_every = 10
    config.checkpoint_every = 10
    config.keep_checkpoints = 2
    config.profile_steps = ()  # e.g. (3, 4): a profiler trace of these steps
    config.write_episodes = True
    config.evaluate = False  # a full held-out evaluation before and after
    config.max_minutes = 0.0  # stop after so many minutes of self-play; 0: play all steps

    # The policy: a Hugging Face folder, or "tiny" (ships with the package).
    config.policy = ConfigDict()
    config.policy.folder = ""
    config.policy.compute_dtype = "bfloat16"
    config.policy.remat = "block"

    # Document clusters: "tiny" (the generated world), a folder of .txt/.md files, or a .jsonl.
    config.data = ConfigDict()
    config.data.source = ""
    config.data.grouping = "similarity"  # or "order"
    config.data.documents_per_cluster = 20
    config.data.max_document_tokens = 3200
    config.data.held_out = 0.05  # share of clusters that training never sees
    config.data.validation = ""  # .jsonl of {"task", "documents", "question", "answer"}
    config.data.tasks = ("general_qa", "financial_math", "multiple_choice")
    config.data.task_weights = (1.0, 1.0, 1.0)

    # The game: see games/spell.py, SpellConfig, for each field.
    config.game = ConfigDict()
    config.game.name = "spell"
    config.game.prompts = "full"
    config.game.questions = 128
    config.game.generation_batch = 480
    config.game.max_generations = 10
    config.game.group_size = 8
    config.game.verifier_group_size = 8
    config.game.documents = (5,)
    config.game.memory = 3
    config.game.memory_low = 0.01
    config.game.memory_high = 1.0
    config.game.mapping = "gaussian"
    config.game.mu = 0.5
    config.game.sigma = 0.5 / 3
    config.game.max_answer_tokens = 40
    config.game.format_penalty = True
    config.game.grounding_samples = 1
    config.game.grounding_threshold = 1
    config.game.reference = "questioner"
    config.game.anchor_samples = 4
    config.game.anchor_refresh = 0
    config.game.responder_reward = "max"
    config.game.rule = "match"
    config.game.judge_url = ""
    config.game.judge_model = ""
    config.game.train_questioner = True
    config.game.negatives = 1.0
    config.game.train_verifier = True
    config.game.verifier_share = 0.125
    config.game.consistency_gate = True
    config.game.balance_verdicts = False
    config.game.keep_surplus = False
    config.game.static_questions = 960  # game "rlvr" only

    # The sampler: shapes are compiled once; a prompt goes into the smallest bucket that holds it.
    config.sampler = ConfigDict()
    config.sampler.temperature = 0.7
    config.sampler.top_p = 0.95
    config.sampler.prompt_buckets = (2048, 6144, 18000)
    config.sampler.token_budget = 65_536  # prompt tokens of one prefill batch
    config.sampler.max_streams = 512  # siblings decoded at once
    config.sampler.max_tokens = 4096  # cap of questions and answers
    config.sampler.max_verdict_tokens = 4096

    # The update.
    config.optimiser = ConfigDict()
    config.optimiser.learning_rate = 2e-6
    config.optimiser.schedule = "constant"
    config.optimiser.warmup_steps = 0
    config.optimiser.final_fraction = 0.0
    config.optimiser.b1 = 0.9
    config.optimiser.b2 = 0.999
    config.optimiser.weight_decay = 0.01
    config.optimiser.clip_norm = 1.0
    config.loss = ConfigDict()
    config.loss.aggregation = "token_mean"
    config.loss.behaviour = "current"
    config.loss.clip_low = 0.2
    config.loss.clip_high = 0.2
    config.loss.dual_clip = 3.0
    config.loss.kl_weight = 0.0
    config.loss.entropy_weight = 0.0
    config.packing = ConfigDict()
    config.packing.buckets = ((8192, 4096), (24_576, 16_384), (51_200, 32_768))  # (T, A)
    config.packing.token_budget = 51_200
    config.packing.shared_prefix = True

    # Devices along each mesh axis; -1 takes what is left.
    config.mesh = ConfigDict({"data": 1, "fsdp": -1, "context": 1, "tensor": 1, "expert": 1})
    return config
