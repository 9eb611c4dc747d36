"""Tests of the loss's variants against TRL's GRPOTrainer and DPOTrainer on the same numbers."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spell_jax.learner import loss as losses
from spell_jax.learner.loss_config import LossConfig
from spell_jax.learner.packing import Bucket
from tests import tiny

pytestmark = pytest.mark.slow

LENGTHS = (6, 2, 5, 3)
ADVANTAGES = (1.2, -0.7, -1.0, 0.5)
RANDOM = np.random.default_rng(0)
LOGPROBS = [-RANDOM.exponential(1.5, n) for n in LENGTHS]
OLD, REFERENCE = ([x + 0.4 * RANDOM.normal(size=len(x)) for x in LOGPROBS] for _ in range(2))
LONGEST = 8  # maximum number of tokens of an answer


@dataclasses.dataclass(frozen=True)
class Case:
    """Fields of LossConfig, and the corresponding fields of TRL's GRPOConfig."""

    ours: dict[str, Any]
    trl: dict[str, Any]


CASES = {
    "GRPO": Case({"aggregation": "sequence_mean"}, {"loss_type": "grpo"}),
    "DAPO": Case({"clip_high": 0.28}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "Dr. GRPO": Case(
        {"aggregation": "sequence_sum", "sequence_tokens": LONGEST}, {"loss_type": "dr_grpo"}
    ),
    "GSPO": Case(
        {
            "aggregation": "sequence_mean",
            "ratio": "sequence_mean",
            "clip_low": 0.03,
            "clip_high": 0.04,
        },
        {"loss_type": "grpo", "importance_sampling_level": "sequence"}
        | {"epsilon": 0.03, "epsilon_high": 0.04},
    ),
    "CISPO": Case(
        {"objective": "cispo", "clip_low": 1.0, "clip_high": 0.3},
        {"loss_type": "cispo", "epsilon_high": 1.3},  # TRL's field is the bound itself
    ),
    "KL": Case({"kl_weight": 0.4}, {"loss_type": "dapo", "beta": 0.4}),
}


def padded(rows: list[np.ndarray]) -> np.ndarray:
    return np.stack([np.pad(row, (0, LONGEST - len(row))) for row in rows])


def by_trl(fields: dict[str, Any]) -> tuple[float, list[np.ndarray]]:
    """Compute TRL's GRPO loss and its gradient for each answer's logprobs; no model runs."""
    torch = pytest.importorskip("torch", reason="the comparison needs torch and trl (extra 'test')")
    trainers = pytest.importorskip("trl.trainer.grpo_trainer", reason="extra 'test'")
    fields = {"importance_sampling_level": "token", "epsilon": 0.2, "beta": 0.0} | fields
    logprobs = torch.tensor(padded(LOGPROBS), requires_grad=True)
    mask = torch.tensor(padded([np.ones(n) for n in LENGTHS]))
    trainer = mock.Mock(
        loss_type=fields["loss_type"],
        importance_sampling_level=fields["importance_sampling_level"],
        epsilon_low=fields["epsilon"],
        epsilon_high=fields.get("epsilon_high", fields["epsilon"]),
        beta=fields["beta"],
        max_completion_length=LONGEST,
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, logprobs.detach(), None),
    )
    trainer.args = mock.Mock(delta=None, steps_per_generation=1, use_bias_correction_kl=False)
    trainer.accelerator = mock.Mock(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
    )
    inputs = {
        "prompt_ids": torch.zeros((len(LENGTHS), 1), dtype=torch.long),
        "prompt_mask": torch.ones((len(LENGTHS), 1), dtype=torch.long),
        "completion_ids": torch.zeros(mask.shape, dtype=torch.long),
        "completion_mask": mask,
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.double),
        "old_per_token_logps": torch.tensor(padded(OLD)),
        "ref_per_token_logps": torch.tensor(padded(REFERENCE)),
        "num_items_in_batch": mask.sum(),
    }
    loss = trainers.GRPOTrainer._compute_loss(trainer, mock.Mock(training=True), inputs)
    loss.backward()
    gradients = [row[:n].numpy() for row, n in zip(logprobs.grad, LENGTHS, strict=True)]
    return loss.item(), gradients


def by_us(config: LossConfig) -> tuple[float, np.ndarray]:
    """Compute the same values with our loss; the answers are concatenated."""
    group = tiny.group([1], [[2] * n for n in LENGTHS], ADVANTAGES, logprobs=OLD)
    bucket = Bucket(1 + sum(LENGTHS), sum(LENGTHS))
    packed = tiny.pack([group], bucket, config.aggregation, config.sequence_tokens)
    (batch,) = jax.tree.map(jnp.asarray, packed)
    reference = jnp.concatenate(REFERENCE)[None]

    def value(logprobs):
        reference_logprobs = reference if config.kl_weight else None
        return losses.batch_loss(
            logprobs, jnp.zeros_like(logprobs), batch, config, reference_logprobs
        )[0]

    loss, gradient = jax.value_and_grad(value)(jnp.concatenate(LOGPROBS)[None])
    return float(loss), np.asarray(gradient)[0]


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_trl(name: str) -> None:
    loss, gradients = by_trl(CASES[name].trl)
    config = LossConfig(old_logprobs="rollout", dual_clip=0.0, **CASES[name].ours)
    our_loss, gradient = by_us(config)
    assert our_loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(gradient, np.concatenate(gradients), rtol=1e-4, atol=1e-6)
    is_clipped = gradient == 0  # no token in CISPO, nor with a KL term
    assert is_clipped.any() == (name not in ("CISPO", "KL"))


def by_trl_dpo(beta: float) -> tuple[float, list[np.ndarray]]:
    """Compute TRL's DPO loss of two pairs and its gradient for each answer's logprobs.

    No model runs. The chosen answers come first in TRL's batch: the first two of LENGTHS.
    """
    torch = pytest.importorskip("torch", reason="the comparison needs torch and trl (extra 'test')")
    trainers = pytest.importorskip("trl.trainer.dpo_trainer", reason="extra 'test'")
    logprobs = torch.tensor(padded(LOGPROBS), requires_grad=True)
    mask = torch.tensor(padded([np.ones(n) for n in LENGTHS]), dtype=torch.long)
    nothing = torch.zeros_like(logprobs)
    means = {"entropy": nothing, "mean_logits": nothing, "is_top1": nothing.bool()}
    outputs = mock.Mock(**{"log_probs": logprobs} | means)
    trainer = mock.Mock(
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        beta=beta,
        f_divergence_type="reverse_kl",
        precompute_ref_logps=True,
        aux_loss_enabled=False,
        use_weighting=False,
        ld_alpha=None,
        _total_train_tokens=0,
        _tp_size=1,
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
    )
    trainer.accelerator = mock.Mock(gather=lambda x: x, gather_for_metrics=lambda x: x)
    prompt = torch.ones((len(LENGTHS), 1), dtype=torch.long)
    reference = torch.tensor([row.sum() for row in REFERENCE])
    inputs = {
        "input_ids": torch.zeros((len(LENGTHS), 1 + LONGEST), dtype=torch.long),
        "attention_mask": torch.cat([prompt, mask], dim=1),
        "completion_mask": torch.cat([0 * prompt, mask], dim=1),
        "ref_chosen_logps": reference[:2],
        "ref_rejected_logps": reference[2:],
    }
    loss = trainers.DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    loss.backward()
    gradients = [row[:n].numpy() for row, n in zip(logprobs.grad, LENGTHS, strict=True)]
    return loss.item(), gradients


@pytest.mark.parametrize("beta", [0.1, 0.5, 2.0])
def test_preference_loss_and_gradient_equal_trl(beta: float) -> None:
    loss, gradients = by_trl_dpo(beta)
    config = LossConfig(
        objective="dpo", old_logprobs="reference", aggregation="sequence_mean", beta=beta
    )
    pairs = [(0, 2), (1, 3)]  # (chosen, rejected)
    groups = [
        tiny.group(
            [1],
            [[2] * LENGTHS[i] for i in pair],
            [1.0, -1.0],
            logprobs=[REFERENCE[i] for i in pair],
        )
        for pair in pairs
    ]
    packed = tiny.pack(groups, Bucket(2 + sum(LENGTHS), sum(LENGTHS)), config.aggregation)
    (batch,) = jax.tree.map(jnp.asarray, packed)
    order = [i for pair in pairs for i in pair]  # the first pair is longer, so it is packed first
    assert batch.answer[0].tolist() == [n for n, i in enumerate(order) for _ in range(LENGTHS[i])]
    logprobs = jnp.concatenate([LOGPROBS[i] for i in order])[None]

    def value(logprobs):
        return losses.batch_loss(logprobs, jnp.zeros_like(logprobs), batch, config)[0]

    our_loss, gradient = jax.value_and_grad(value)(logprobs)
    assert float(our_loss) == pytest.approx(loss, rel=1e-5)
    expected_gradient = np.concatenate([gradients[i] for i in order])
    np.testing.assert_allclose(np.asarray(gradient)[0], expected_gradient, rtol=1e-5)
