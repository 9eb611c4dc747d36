"""The fields of a run with the paper's values; every other config is a small delta of this one.

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
    # A project of Weights & Biases (extra "wandb") that metrics go to as well; "": none.
    config.wandb = ""
    # A step's file of episodes has so many characters at most, before compression: first what was
    # asked and answered, then documents, for the report's page. 0: no files.
    config.episode_characters = 20_000_000
    config.evaluate = False  # a full held-out evaluation before and after
    # Stop after so many minutes of self-play; 0: play all steps. The one thing that goes by the
    # clock: a run that it ended and that is started again has so many minutes more.
    config.max_minutes = 0.0
    # Behind the first SIGTERM a run has so many seconds to end its phase and save.
    config.preemption_limit_s = 25.0
    # 1: a step is played while the one before it is learned from, with the weights before that;
    # not behind a checkpoint. For loss.old_logprobs "rollout" or loss.tis_cap above 0.
    config.staleness = 0
    # A step's rows are learned from in so many updates of the policy, each of about as many groups;
    # above 1 for loss.old_logprobs "recompute" or "rollout", or loss.tis_cap above 0.
    config.minibatches = 1
    # Another run's folder, or RUN/checkpoints/STEP: its weights are begun with. Not looked at where
    # there is a checkpoint to resume.
    config.init_from = ""
    config.policy = _policy()
    config.data = _data()
    config.algorithm = _algorithm()
    config.sampler = _sampler()
    config.optimizer = _optimizer()
    config.loss = _loss()
    config.packing = _packing()
    # Devices along each mesh axis; -1 takes what is left.
    config.mesh = ConfigDict({"data": 1, "fsdp": -1, "context": 1, "tensor": 1, "expert": 1})
    return config


def _policy() -> Any:
    """The policy: a Hugging Face folder, or "tiny" (ships with the package)."""
    policy: Any = ConfigDict()
    policy.folder = ""
    policy.compute_dtype = "bfloat16"
    policy.remat = "block"  # what the backward pass recomputes; policy/config.py lists the names
    policy.attention = "auto"  # or a kernel by name; attention/attend.py lists them
    # With mesh.context above 1: pass keys and values around a ring instead of gathering them.
    policy.ring = False
    policy.thinking = ""  # "on" or "off", for chat templates that know it (Qwen3)
    # "linear" or "yarn": a context rope_factor times as long as the folder's.
    policy.rope_scaling = ""
    policy.rope_factor = 1.0
    # Above 0: only adapters of this rank are trained, on the linear layers that the pattern is
    # found in (self_attn.q_proj, mlp.down_proj, ...); policy/lora.py.
    policy.lora_rank = 0
    policy.lora_alpha = 32.0
    policy.lora_pattern = "_proj"
    return policy


def _data() -> Any:
    """Document clusters: "tiny" (the generated world), a folder of .txt/.md files, a .jsonl, or a
    folder that data_pipeline built, whose clusters and tasks are as they are there."""
    data: Any = ConfigDict()
    data.source = ""
    data.grouping = "similarity"  # or "order"
    data.documents_per_cluster = 20
    data.max_document_tokens = 3200
    data.held_out = 0.05  # share of clusters that training never sees
    # .jsonl of {"task", "documents", "question", "answer"}: questions that the algorithm is given,
    # for algorithms that play such instead of clusters; and others, that training never sees.
    data.questions = ""
    data.validation = ""
    data.tasks = ("general_qa", "financial_math", "multiple_choice")
    data.task_weights = (1.0, 1.0, 1.0)
    return data


def _algorithm() -> Any:
    """The algorithm; algorithms/spell/config.py says what each field means."""
    algorithm: Any = ConfigDict()
    algorithm.name = "spell"
    algorithm.prompts = "full"
    algorithm.questions = 128
    algorithm.generation_batch = 480
    algorithm.max_generations = 10
    algorithm.group_size = 8
    algorithm.verifier_group_size = 8
    algorithm.documents = (5,)
    algorithm.memory = 3
    algorithm.memory_documents = "shown"
    algorithm.memory_low = 0.01
    algorithm.memory_high = 1.0
    algorithm.mapping = "gaussian"
    algorithm.mu = 0.5
    algorithm.sigma = 0.5 / 3
    algorithm.max_answer_tokens = 40
    algorithm.distinct_options = False
    algorithm.format_penalty = True
    algorithm.skip_penalty = False
    algorithm.grounding_samples = 1
    algorithm.grounding_threshold = 1
    algorithm.reference_source = "questioner"
    algorithm.reader_samples = 4
    algorithm.reader_refresh = 0
    algorithm.responder_reward = "max"
    algorithm.rule = "match"
    algorithm.judge_url = ""
    algorithm.judge_model = ""
    algorithm.train_questioner = True
    algorithm.negatives = 1.0
    algorithm.train_verifier = True
    algorithm.malformed_penalty = True
    algorithm.verifier_share = 0.125
    algorithm.consistency_gate = True
    algorithm.balance_verdicts = False
    algorithm.divide_by_deviation = True
    algorithm.keep_surplus = False
    algorithm.static_questions = 960  # algorithm "rlvr" only
    return algorithm


def _sampler() -> Any:
    """Shapes are compiled once; sizes are over all devices (sampler/engine.py)."""
    sampler: Any = ConfigDict()
    sampler.temperature = 0.7
    sampler.top_p = 0.95
    sampler.top_k = 0
    sampler.min_p = 0.0
    sampler.max_tokens = 4096  # cap of questions and answers
    sampler.max_verdict_tokens = 4096
    sampler.max_prompt = 18_000  # cap of prompts; longer ones are refused and counted
    sampler.page_size = 128  # tokens of a page; prompts share whole pages
    sampler.kv_cache_tokens = 1_048_576  # of prompts and answers in memory
    sampler.slots = 512  # answers decoded at once
    sampler.samples_per_prompt_batch = 8  # answers to a prompt that meet it in one product
    sampler.prefill_tokens = 8192  # of prompts read in one call
    sampler.decode_tokens = 64  # of a slot between two plans
    sampler.speculative_tokens = 0  # looked up in the prompt and checked in one pass; e.g. 4
    sampler.speculative_ngram = 2  # last tokens that must stand where a guess is looked up
    sampler.cache_dtype = "compute"  # or "int8"
    sampler.weights_dtype = "compute"  # or "int8", of what answers are drawn with
    sampler.attention = "auto"  # the platform's kernel for the pool, or "xla"
    return sampler


def _optimizer() -> Any:
    """AdamW; learner/update.py, OptimizerConfig."""
    optimizer: Any = ConfigDict()
    optimizer.learning_rate = 2e-6
    optimizer.schedule = "constant"
    optimizer.warmup_steps = 0
    optimizer.final_fraction = 0.0
    optimizer.b1 = 0.9
    optimizer.b2 = 0.999
    optimizer.weight_decay = 0.01
    optimizer.clip_norm = 1.0
    optimizer.offload = False  # AdamW's moments wait in the host's memory
    optimizer.offload_weights = False  # and so do the float32 weights
    optimizer.max_skipped = 3  # so many updates in a row whose numbers are not finite end the run
    return optimizer


def _loss() -> Any:
    """The loss; learner/loss.py, LossConfig."""
    loss: Any = ConfigDict()
    loss.objective = "clip"  # or "cispo"
    loss.ratio = "token"  # or "sequence", "sequence_mean"
    loss.aggregation = "token_mean"
    loss.sequence_tokens = 0  # the constant of aggregation "sequence_sum"
    loss.old_logprobs = "on_policy"  # or "rollout", "recompute"
    loss.tis_cap = 0.0  # above 0: truncated importance sampling
    loss.clip_low = 0.2
    loss.clip_high = 0.2
    loss.dual_clip = 3.0  # 0: none
    loss.kl_weight = 0.0
    loss.kl_estimator = "k3"  # or "k1", "k2"
    loss.entropy_weight = 0.0
    return loss


def _packing() -> Any:
    """Micro-batches of packed groups; buckets are (tokens T, of which answers A)."""
    packing: Any = ConfigDict()
    packing.buckets = ((8192, 4096), (24_576, 16_384), (51_200, 32_768))
    packing.token_budget = 51_200
    packing.shared_prefix = True
    return packing
