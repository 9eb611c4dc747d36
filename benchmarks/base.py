"""Options, random policies, samplers and timing that the benchmarks share."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable
from typing import Annotated, Any

import jax
import numpy as np

from spell_jax.config import default_config
from spell_jax.data.samples import Sample
from spell_jax.launch import aot
from spell_jax.launch.work import ProgramCounts
from spell_jax.learner import advantages, packing
from spell_jax.learner.learner import Learner
from spell_jax.learner.loss_config import LossConfig
from spell_jax.learner.optimizer import OptimizerConfig
from spell_jax.policy import transformer
from spell_jax.policy.config import PolicyConfig
from spell_jax.rollout.replies import Reply
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.engine import Sampler
from spell_jax.sampler.requests import Options
from spell_jax.sampler.session import Session

# Sampling parameters of the benchmarks that measure speed alone. top_p is the paper's, because its
# bisection over the logits is part of a decode pass.
SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95}
Prompts = list[list[int]]


@dataclasses.dataclass
class BenchmarkCommand:
    """Base of the benchmarks: the fields are the command's options, annotated with their help."""

    def run(self) -> dict[str, Any]:
        """Measure; return JSON values, which __main__.py prints as one line."""
        raise NotImplementedError


@dataclasses.dataclass
class PolicyBenchmark(BenchmarkCommand):
    """Base of the benchmarks of a policy with random weights.

    Attributes:
      model: architecture, from --policy if it is given, else from the other options. The options
        `layers`, `width` and `vocab` are set to its sizes.
    """

    policy: Annotated[str, "Hugging Face config.json whose architecture is used"] = ""
    layers: Annotated[int, "layers L; 0: 3, or as many as the config.json has"] = 0
    width: Annotated[int, "model width D"] = 512
    vocab: Annotated[int, "vocabulary V"] = 8192
    window: Annotated[int, "tokens that a query sees in every layer; 0: as the policy says"] = 0
    dtype: Annotated[str, "dtype of weights and activations"] = "float32"
    group: Annotated[int, "answers to a prompt G"] = 8

    def __post_init__(self) -> None:
        if self.policy:
            model = PolicyConfig.from_hf(pathlib.Path(self.policy))
        else:
            model = PolicyConfig(
                vocab_size=self.vocab,
                width=self.width,
                layers=3,
                heads=max(1, self.width // 64),
                kv_heads=max(1, self.width // 128),
                head_size=64,
                feed_forward=3 * self.width,
            )
        model = model.with_layers(self.layers or model.layers)
        if self.window:
            windows = {"window": self.window, "window_layers": tuple(range(model.layers))}
            model = dataclasses.replace(model, **windows)
        self.model = model
        # The options become the sizes that are measured, because the line repeats the options.
        self.layers, self.width = self.model.layers, self.model.width
        self.vocab = self.model.vocab_size


@dataclasses.dataclass
class SamplerBenchmark(PolicyBenchmark):
    """Options of benchmarks that sample: sizes of the policy, of pages and of prefill calls."""

    page_size: Annotated[int, "tokens of a page C"] = 128
    prefill: Annotated[int, "prompt tokens of a prefill call"] = 2048

    def make_sampler(
        self, prompt: int, response: int, slots: int, pages: int = 0, **sizes: Any
    ) -> Sampler:
        """Make a sampler without stop tokens, so that answers end only at their caps.

        Args:
          prompt: tokens of the longest prompt.
          response: tokens of the longest answer.
          slots: sequences decoded at once.
          pages: pages of the pool on each row shard of the mesh; 0: no slot ever waits for one.
          **sizes: other fields of SamplerConfig.
        """
        mesh = meshes.make_mesh()
        # Enough for the longest prompt and answer of every slot, even if no prompt is shared.
        pages = pages or slots * sum(-(-n // self.page_size) for n in (prompt, response))
        config = SamplerConfig(
            **SAMPLING,
            max_tokens=response,
            max_prompt=prompt,
            page_size=self.page_size,
            kv_cache_tokens=meshes.row_shards(mesh) * pages * self.page_size,
            prefill_tokens=self.prefill,
            slots=slots,
            **sizes,
        )
        return Sampler(self.model, config, (), mesh)

    def program_counts(self, prompt: int) -> ProgramCounts:
        """Count the policy's programs on one device, with prompts of `prompt` tokens."""
        config = default_config("spell")  # its sizes do not matter: counts are per token
        config.sampler.max_tokens = 1
        config.policy.compute_dtype = np.dtype(self.dtype).name
        mesh = meshes.make_mesh(devices=jax.devices()[:1])
        return ProgramCounts(aot.RunPrograms(config, self.model, mesh, prompt))


def random_params(
    policy: PolicyConfig, dtype: str, mesh: jax.sharding.Mesh | None = None
) -> transformer.Params:
    """Initialize a policy's weights at random, sharded over a mesh; None: over all devices."""
    shapes, axes = transformer.abstract_params(policy)

    def make(key):
        return jax.tree.map(lambda x: x.astype(dtype), transformer.init(policy, key))

    # Jitted with output shardings, so that no device ever holds the whole policy.
    where = meshes.shardings(mesh or meshes.make_mesh(), axes, shapes)
    return jax.jit(make, out_shardings=where)(jax.random.key(0))


def make_learner(
    policy: PolicyConfig,
    bucket: packing.Bucket,
    budget: int,
    dtype: str = "float32",
    shared_prefix: str = "tree",
) -> Learner:
    """Make a learner with rows of one length.

    Args:
      policy: architecture of the policy.
      bucket: shape of a row.
      budget: tokens of a micro-batch; at least one row.
      dtype: compute dtype.
      shared_prefix: what is laid out once (packing.PackingConfig).
    """
    return Learner(
        policy,
        OptimizerConfig(),
        LossConfig(),
        packing.PackingConfig((bucket,), max(budget, bucket.length), shared_prefix),
        meshes.make_mesh(),
        temperature=SAMPLING["temperature"],
        compute_dtype=dtype,
    )


def sample_answers(
    session: Session, prompts: Prompts, group: int, tokens: int, seed: int = 1, **overrides: Any
) -> list[list[Sample]]:
    """Sample `group` answers of at most `tokens` tokens to each prompt; overrides are Options."""
    options = Options(**SAMPLING | overrides, max_tokens=tokens)
    answers = session.sample(prompts, group, jax.random.key(seed), options)
    return [samples for samples in answers if samples is not None]


def random_group(
    rng: np.random.Generator, prompt: list[int], samples: list[Sample], name: str
) -> packing.TrainGroup:
    """Make a training group with random rewards."""
    rewards = advantages.group_advantages(rng.random(len(samples)))
    return Reply(prompt, samples, ()).group(rewards, name)


def random_groups(
    rng: np.random.Generator, prompts: np.ndarray, vocab: int, group: int, tokens: int
) -> list[packing.TrainGroup]:
    """Make a training group for each prompt of [N, P], with random answers and advantages.

    Args:
      rng: generator of the token ids and advantages.
      prompts: token ids of the prompts [N, P].
      vocab: vocabulary V.
      group: answers to a prompt G.
      tokens: tokens of an answer S.
    """
    return [
        packing.TrainGroup(
            prompt,
            [Sample(answer) for answer in rng.integers(vocab, size=(group, tokens))],
            list(rng.normal(size=group)),
            "answers",
        )
        for prompt in prompts
    ]


def best_seconds(call: Callable[[], Any], repeats: int) -> float:
    """Return the seconds of the fastest of `repeats` calls, each until its result is ready."""
    seconds = []
    for _ in range(repeats):
        clock = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - clock)
    # The fastest call: other work on the machine can only make a call slower.
    return min(seconds)
