"""Metrics of an update: means of its sums, floating-point operations, and speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spell_jax.learner.packing import MicroBatch, TrainGroup
from spell_jax.policy.config import PolicyConfig

# Dense bfloat16 floating-point operations per second of one device, as stated by its maker: in
# NVIDIA's data sheets (without sparsity), and in Google Cloud's "System architecture" pages of TPU
# v4, v5e ("v5 lite"), v5p ("v5") and v6e ("v6 lite").
PEAKS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
}


def means(
    sums: Mapping[str, Any], norms: Mapping[str, Any], group_names: Sequence[str]
) -> dict[str, float]:
    """Return metrics of an update: the loss, and other sums divided by token count or loss weight.

    "router_max_load" is the busiest expert's tokens over the mean, averaged over layers (1:
    balanced; E / k: all tokens go to the same k experts), "router_idle" the share of experts
    without tokens. "router_difference" is the share of tokens and layers in which the recorded
    experts differ from the router's choice (loss.routing "sampled"). "entropy/NAME" is given for
    each of the group names that has tokens.
    """
    sums = dict(sums)
    extra_metrics = {}
    if (load := sums.pop("router_load", None)) is not None:
        extra_metrics["router_max_load"] = float(np.mean(load.max(axis=1) / load.mean(axis=1)))
        extra_metrics["router_idle"] = float(np.mean(load == 0))
    if (counts := sums.pop("router_difference", None)) is not None:
        extra_metrics["router_difference"] = float(counts[0] / max(counts[1], 1.0))
    # Without strict: the sums have a last entry for all other names, which no metric shows.
    by_name = zip(
        group_names, sums.pop("entropy_by_name"), sums.pop("tokens_by_name"), strict=False
    )
    extra_metrics |= {
        f"entropy/{name}": float(sum_ / count) for name, sum_, count in by_name if count
    }
    # An update of padding alone has no tokens; it reports zeros, not NaN.
    tokens = max(float(sums["tokens"]), 1.0)
    weight = float(sums["weight"]) or 1.0
    # The loss is already a weighted mean (aggregation.weigh). Entropies and gaps are means over
    # tokens, whatever the aggregation; all other sums were made with loss weights.
    per = {"loss": 1.0, "entropy": tokens, "sampler_difference": tokens}
    averages = {
        name: float(value) / per.get(name, weight)
        for name, value in sums.items()
        if name not in ("tokens", "weight")
    }
    norms = {name: float(value) for name, value in norms.items()}
    return averages | norms | extra_metrics | {"answer_tokens": tokens}


def advantages(groups: Sequence[TrainGroup]) -> dict[str, tuple[float, int]]:
    """Return (sum, count) over answers: "advantage/NAME", and absolute: "advantage_size/NAME"."""
    by_name: dict[str, list[float]] = {}
    for group in groups:
        by_name.setdefault(group.name, []).extend(group.advantages)
    pairs = {}
    for name, values in by_name.items():
        pairs[f"advantage/{name}"] = (sum(values), len(values))
        pairs[f"advantage_size/{name}"] = (sum(map(abs, values)), len(values))
    return pairs


def sampler_difference(
    sampled: Sequence[TrainGroup], recomputed: Sequence[TrainGroup]
) -> dict[str, float]:
    """Return {"sampler_difference": mean |sampler's logprob - learner's logprob|}.

    The mean is over answer tokens that have both, without NaN; {} if there are none.
    """
    gaps = _logprob_gaps(sampled, recomputed)
    return {"sampler_difference": float(np.abs(gaps).mean())} if len(gaps) else {}


def teacher_kl(sampled: Sequence[TrainGroup], scored: Sequence[TrainGroup]) -> dict[str, float]:
    """Return {"teacher_kl": mean of log p - log p_teacher over sampled tokens}, nats; {} for none.

    `scored` are the groups with the teacher's logprobs. The mean estimates KL(p || p_teacher).
    """
    gaps = _logprob_gaps(sampled, scored)
    return {"teacher_kl": -float(gaps.mean())} if len(gaps) else {}


def _logprob_gaps(before: Sequence[TrainGroup], after: Sequence[TrainGroup]) -> np.ndarray:
    """Subtract `before`'s logprobs from `after`'s [N], for answers that have both, without NaN."""
    # float64: the mean of many small gaps would lose digits in float32.
    gaps = [
        np.asarray(new.logprobs, np.float64) - np.asarray(old.logprobs, np.float64)
        for old_group, new_group in zip(before, after, strict=True)
        for old, new in zip(old_group.samples, new_group.samples, strict=True)
        if old.logprobs is not None and new.logprobs is not None
        # NaN: the answer fits no row (old_logprobs.with_logprobs).
        if np.isfinite(new.logprobs).all()
    ]
    return np.concatenate(gaps) if gaps else np.zeros(0)


def operations(policy: PolicyConfig, tokens: int, answer_tokens: int, pairs: float) -> float:
    """Count the floating-point operations of an update of packed tokens, without recomputation.

    A matrix product with weights costs 2 operations per weight and token forward, and twice that
    backward (once if only adapters are trained, which are not counted themselves). Only the experts
    that a token uses count. For each of the `pairs` of a query and a key, attention's two products
    cost 4 N H forward and twice that backward; a token and itself are half a pair. The head is
    computed for answer tokens only.
    """
    c = policy
    # Projections of queries and output (2 N), keys and values (2 K). The gated MLP has 3 matrices.
    attention = c.width * c.head_size * (2 * c.heads + 2 * c.kv_heads)
    mlp = 3 * c.width * c.feed_forward * (c.experts_per_token or 1) + c.width * c.experts
    weights = c.layers * (attention + mlp)
    # Forward 2, gradient of activations 2, gradient of weights 2: adapters do not need the last.
    passes = 4 if c.lora else 6
    head = float(passes) * c.vocab_size * c.width * answer_tokens
    return passes * weights * tokens + 12 * c.layers * c.heads * c.head_size * pairs + head


def batch_operations(policy: PolicyConfig, batch: MicroBatch) -> float:
    """Count a micro-batch's operations; the pairs of attention are a mean over the layers."""
    is_token = batch.last_query >= 0
    # A query sees itself and all tokens before it in its own text, or those in the layer's window.
    visible = batch.positions[is_token] + 1
    windows, layers = np.unique(policy.layer_windows, return_counts=True)
    pairs_of_windows = [np.sum(np.minimum(visible, window) - 0.5) for window in windows]
    pairs = float(np.average(pairs_of_windows, weights=layers))
    answers = int(np.sum(batch.answer >= 0))
    return operations(policy, int(np.sum(is_token)), answers, pairs)


def speed(
    updates: Sequence[Mapping[str, float]], seconds: float, devices: Sequence[Any]
) -> dict[str, tuple[float, float]]:
    """Return (sum, weight) of "tokens_per_second/trained" (prompts and answers) and "mfu" by name.

    "mfu" (model FLOP utilization) needs a known peak of the devices. `seconds` covers all updates.
    """
    tokens, operations = (
        sum(update[name] for update in updates) for name in ("trained_tokens", "operations")
    )
    speeds = {"tokens_per_second/trained": (tokens, seconds)}
    mfu = utilization(operations / seconds, devices)
    return speeds if mfu is None else speeds | {"mfu": (mfu, 1.0)}


def utilization(operations_a_second: float, devices: Sequence[Any]) -> float | None:
    """Return the used share of the devices' bfloat16 peak; None if their kind is not in PEAKS."""
    # All devices of a mesh are of one kind.
    peak = PEAKS.get(devices[0].device_kind)
    return operations_a_second / (peak * len(devices)) if peak else None
