"""From a config to the parts of a run: models, rollout worker, algorithm, held-out evaluation."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Sequence

import jax

from spell_jax.algorithms import registry
from spell_jax.algorithms.base import Algorithm, AlgorithmContext
from spell_jax.algorithms.config import AlgorithmConfig
from spell_jax.algorithms.held_out import Evaluation
from spell_jax.config import RunConfig, read
from spell_jax.data import clusters, stream
from spell_jax.data.config import open_clusters
from spell_jax.data.questions import Question
from spell_jax.learner.learner import Learner
from spell_jax.learner.loss_config import LossConfig
from spell_jax.learner.optimizer import OptimizerConfig
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.model import ModelConfig, find_folder, read_model
from spell_jax.policy.tokenizer import Tokenizer
from spell_jax.rollout.judge import JudgeFunction, make_judge
from spell_jax.rollout.text_model import TextSampler
from spell_jax.rollout.worker import RolloutWorker
from spell_jax.runtime.config import Config
from spell_jax.runtime.log.run_logger import PhaseTimer
from spell_jax.sampler.engine import Sampler, SamplerConfig
from spell_jax.selfplay import prompts as prompt_sets


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of a run, without its weights, which are in the states (trainer/state.py)."""

    policy: PolicyConfig  # architecture, as the config changes it
    tokenizer: Tokenizer
    folder: pathlib.Path  # Hugging Face folder of its first weights
    learner: Learner


@dataclasses.dataclass
class Run:
    """The parts of a run; making them uses no device but for the mesh."""

    config: RunConfig
    own_models: dict[str, Model]  # models with their own weights by name, "policy" first
    worker: RolloutWorker  # samples from the models for the algorithm
    algorithm: Algorithm
    evaluation: Evaluation | None  # None if the data has no held-out questions
    timer: PhaseTimer = dataclasses.field(default_factory=PhaseTimer)  # of the main thread's phases

    @property
    def policy(self) -> PolicyConfig:
        return self.own_models["policy"].policy

    @property
    def tokenizer(self) -> Tokenizer:
        return self.own_models["policy"].tokenizer

    @property
    def learner(self) -> Learner:
        return self.own_models["policy"].learner

    def model(self, name: str) -> Model:
        """Return the model of this name; the policy for the name of its frozen copy."""
        return self.own_models.get(name, self.own_models["policy"])

    @property
    def trained(self) -> dict[str, Model]:
        return {name: self.own_models[name] for name in ("policy", *self.algorithm.trained)}

    @property
    def copies(self) -> tuple[str, ...]:
        """Names of the models that start as frozen copies of the policy."""
        reference = ["reference"] if self.learner.loss.needs_reference else []
        names = (*self.algorithm.model_names, *reference)
        return tuple(name for name in names if name not in self.own_models)


def make_run(config: RunConfig | Config) -> Run:
    """Check the config and make the run's parts; errors as in config.read."""
    config = read(config)
    folder = find_folder(config.policy.folder)
    mesh, sampling_mesh = config.mesh.make(), config.mesh.make_sampling()
    group_names = config.algorithm.group_names
    policy = _make_model(
        config, config.policy, folder, config.optimizer, config.loss, mesh, group_names
    )
    context = make_context(config, policy.tokenizer)
    algorithm, evaluation = make_algorithm(config, context)
    models = {"policy": policy}
    for name in algorithm.model_names:
        if name in config.models:
            model = config.models[name]
            folder = find_folder(model.folder, f"{name}.folder")
            # Its rows are targets to imitate, with advantage 1: the loss's defaults.
            models[name] = _make_model(config, model, folder, model.optimizer, LossConfig(), mesh)
    samplers = {
        name: _make_text_sampler(model, config.sampler, sampling_mesh, config.algorithm.has_dropout)
        for name, model in models.items()
    }
    worker = RolloutWorker(samplers.pop("policy"), jax.random.key(config.seed), samplers)
    return Run(config, models, worker, algorithm, evaluation)


def make_algorithm(
    config: RunConfig, context: AlgorithmContext
) -> tuple[Algorithm, Evaluation | None]:
    """Make the algorithm and its held-out evaluation; ValueError if fields do not fit the data."""
    algorithm = config.algorithm
    evaluation = registry.find_evaluation(algorithm)(algorithm, context, config.data)
    return registry.make_algorithm(algorithm, context), evaluation


def make_context(config: RunConfig, tokenizer: Tokenizer) -> AlgorithmContext:
    """Make the algorithm's context; only prompts are read now, data is opened when asked for."""
    data, prompts = config.data, config.algorithm.load_prompts()
    # Of texts alone: the chat layout takes its tokens from the longest prompt.
    prompt_cap = config.sampler.max_prompt - len(tokenizer.chat(""))

    # Cached: clusters and held-out clusters come from one split of the same data.
    @functools.cache
    def opened() -> tuple[clusters.ClusterSource, clusters.ClusterSource]:
        return open_clusters(data, config.seed, tokenizer.count, prompt_cap)

    @functools.cache
    def questions() -> tuple[Question, ...]:
        return config.algorithm.read_questions(data.questions) if data.questions else ()

    def deal(source: clusters.ClusterSource) -> stream.TaskStream:
        random_tasks = data.task_choice == "random"
        return stream.TaskStream(
            source, data.tasks, data.task_weights, config.seed, data.shuffle, random_tasks
        )

    # Functions instead of data: an algorithm without clusters never opens a source.
    return AlgorithmContext(
        prompts=prompts,
        count_tokens=tokenizer.count,
        prompt_cap=prompt_cap,
        seed=config.seed,
        steps=config.steps,
        clusters=lambda: opened()[0],
        held_out=lambda: opened()[1],
        deal=deal,
        questions=questions,
        judge=_make_judge(config.algorithm, prompts),
        reward=config.algorithm.load_reward(),
        teacher_prompt=tokenizer.chat if config.loss.distillation_weight else None,
    )


def _make_model(
    config: RunConfig,
    model: ModelConfig,
    folder: pathlib.Path,
    optimizer: OptimizerConfig,
    loss_config: LossConfig,
    mesh: jax.sharding.Mesh,
    group_names: Sequence[str] = (),
) -> Model:
    policy, tokenizer = read_model(model, folder)
    sampler = config.sampler
    fields = f"sampler.max_prompt = {sampler.max_prompt}, sampler.max_tokens = {sampler.max_tokens}"
    policy.check_length(sampler.longest, fields)
    learner = Learner(
        policy,
        optimizer,
        loss_config,
        config.packing,
        mesh,
        config.sampler.temperature,
        model.compute_dtype,
        group_names,
    )
    return Model(policy, tokenizer, folder, learner)


def _make_text_sampler(
    model: Model, config: SamplerConfig, mesh: jax.sharding.Mesh, has_dropout: bool
) -> TextSampler:
    tokenizer = model.tokenizer
    record_experts = model.learner.loss.routing == "sampled"
    sampler = Sampler(
        model.policy,
        config,
        tokenizer.stop_ids,
        mesh,
        tokenizer.stream,
        record_experts,
        has_dropout,
    )
    return TextSampler(sampler, tokenizer)


def _make_judge(algorithm: AlgorithmConfig, prompts: prompt_sets.Prompts) -> JudgeFunction | None:
    if not algorithm.has_judge:
        return None
    url, model = algorithm.judge_url, algorithm.judge_model
    return make_judge(prompts, algorithm.judge_template, url=url, model=model).judge
