"""Tests of adapters: zero at the start, trained alone, merged into kernels, saved for PEFT."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax.traverse_util import flatten_dict

from spell_jax.learner import update
from spell_jax.learner.learner import Learner
from spell_jax.learner.loss_config import LossConfig
from spell_jax.learner.optimizer import OptimizerConfig
from spell_jax.learner.packing import Bucket, PackingConfig
from spell_jax.policy import lora, transformer, weights
from spell_jax.policy.config import LoraConfig
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.engine import Sampler
from tests import tiny
from tests.policy import families

TOKENS = np.random.default_rng(0).integers(0, families.VOCAB, size=(2, 20)).astype(np.int32)
ALL = LoraConfig(rank=4, alpha=8.0)
POLICY = dataclasses.replace(tiny.POLICY, lora=ALL)
logits = jax.jit(transformer.logits, static_argnums=0)


def _names(tree) -> set[str]:
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(key.key for key in path) for path, _ in paths}


def _learner(policy=POLICY, **mesh: int) -> Learner:
    devices = None if mesh else jax.devices()[:1]
    return Learner(
        policy,
        OptimizerConfig(learning_rate=0.01),
        LossConfig(),
        PackingConfig((Bucket(48, 32),), 192),
        meshes.make_mesh(mesh or {"fsdp": 1}, devices),
    )


@pytest.mark.parametrize(
    ("pattern", "adapted"),
    [
        ("_proj", {f"attention/{x}" for x in "qkvo"} | {"mlp/gate", "mlp/up", "mlp/down"}),
        ("self_attn", {f"attention/{x}" for x in "qkvo"}),
        ("(q|v)_proj", {"attention/q", "attention/v"}),
        (r"down_proj$", {"mlp/down"}),
    ],
)
def test_pattern_selects_the_adapted_kernels(pattern: str, adapted: set[str]) -> None:
    policy = dataclasses.replace(tiny.POLICY, lora=LoraConfig(pattern=pattern))
    assert set(policy.lora_targets) == adapted
    trained, _ = lora.split(policy, transformer.abstract_params(policy)[0])
    assert _names(trained) == {f"layers/{path}_lora_{x}" for path in adapted for x in "ab"}


def test_experts_have_no_adapters() -> None:
    changes = {"experts": 4, "experts_per_token": 2, "qk_norm": True, "qkv_bias": False}
    policy = dataclasses.replace(POLICY, **changes)
    assert set(policy.lora_targets) == {f"attention/{x}" for x in "qkvo"}
    assert not any("moe" in name for name in _names(lora.split(policy, _shapes(policy))[0]))
    with pytest.raises(ValueError, match=r"policy\.lora_pattern = 'gate': is in none of"):
        dataclasses.replace(policy, lora=LoraConfig(pattern="gate"))


def _shapes(policy):
    return transformer.abstract_params(policy)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, r"policy\.lora_rank = 0: must be at least 1"),
        ({"alpha": 0.0}, r"policy\.lora_alpha = 0\.0: must be above 0"),
        ({"pattern": "("}, r"policy\.lora_pattern = '\(': not a regular expression"),
        (
            {"pattern": "lm_head"},
            r"policy\.lora_pattern = 'lm_head': is in none of \['mlp\.down_proj'",
        ),
    ],
)
def test_invalid_lora_config_is_rejected(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(tiny.POLICY, lora=dataclasses.replace(ALL, **change))


def test_split_and_join_are_inverse() -> None:
    params = tiny.weights(POLICY)
    trained, frozen = lora.split(POLICY, params)
    assert _names(trained) | _names(frozen) == _names(params)
    assert not _names(trained) & _names(frozen)
    joined = lora.join(trained, frozen)
    jax.tree.map(np.testing.assert_array_equal, joined, params)
    all_params, no_params = lora.split(tiny.POLICY, tiny.weights())
    assert all_params is tiny.weights() and no_params == {}


@pytest.mark.slow
def test_fresh_adapters_do_not_change_logits() -> None:
    learner = _learner()
    state = learner.init(tiny.weights())
    adapted_logits = logits(POLICY, learner.cast(state.params), TOKENS)
    np.testing.assert_allclose(
        adapted_logits, logits(tiny.POLICY, tiny.weights(), TOKENS), atol=1e-6
    )
    a = state.params["layers"]["mlp"]["down_lora_a"]
    bound = tiny.POLICY.feed_forward**-0.5
    assert 0.9 * bound < np.abs(a).max() < bound and not np.array_equal(a[0], a[1])


def test_merged_weights_give_the_same_logits() -> None:
    params = tiny.weights(POLICY)
    config, merged = lora.merge(POLICY, params)
    assert config == tiny.POLICY and _names(merged) == _names(tiny.weights())
    expected_logits = logits(POLICY, params, TOKENS)
    np.testing.assert_allclose(logits(config, merged, TOKENS), expected_logits, atol=1e-4)
    base = logits(tiny.POLICY, lora.split(POLICY, params)[1], TOKENS)
    assert np.abs(base - expected_logits).max() > 0.1
    jax.tree.map(np.testing.assert_array_equal, params, tiny.weights(POLICY))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=["1", "8"])
def test_update_trains_only_the_adapters(mesh) -> None:
    learner, groups = _learner(**mesh), tiny.groups(5)
    params = tiny.weights(POLICY)
    start, frozen = lora.split(POLICY, params)
    state = learner.init(frozen)
    state = dataclasses.replace(state, params=jax.device_put(start, learner.fns.param_shardings))
    state, numbers = learner.update(state, groups)
    assert _names(state.params) == _names(start)
    assert {leaf.shape for leaf in jax.tree.leaves(state.opt_state)} <= {
        leaf.shape for leaf in jax.tree.leaves(start)
    } | {()}
    for before, after in zip(jax.tree.leaves(start), jax.tree.leaves(state.params), strict=True):
        assert np.abs(before - np.asarray(after)).max() > 1e-3
    jax.tree.map(np.testing.assert_array_equal, learner.frozen, frozen)
    assert numbers["gradient_norm"] == pytest.approx(_gradient_norm(), rel=1e-4)


@functools.cache
def _gradient_norm() -> float:
    """Return the norm of the adapters' part of the gradient, with every parameter trained."""
    learner = _learner()
    groups = tiny.groups(5)
    batches = jax.tree.map(jnp.asarray, learner.pack(groups, learner.weigh(groups))[0])

    def loss(params):
        return sum(
            update.micro_batch_loss(learner.spec, params, {}, batch, None)[0] for batch in batches
        )

    gradient = jax.jit(jax.grad(loss))(tiny.weights(POLICY))
    trained, _ = lora.split(POLICY, gradient)
    return float(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(trained))))


@pytest.mark.slow
def test_sampler_applies_the_adapters() -> None:
    config = SamplerConfig(
        0.0,
        max_tokens=8,
        max_prompt=24,
        page_size=8,
        kv_cache_tokens=256,
        slots=2,
    )
    mesh = meshes.make_mesh(devices=jax.devices()[:1])
    params = tiny.weights(POLICY)
    adapted = Sampler(POLICY, config, (), mesh)
    plain = Sampler(tiny.POLICY, config, (), mesh)

    def answers(sampler, params):
        groups = sampler.sample(params, TOKENS, 1, jax.random.key(0))
        return [group[0].tokens.tolist() for group in groups]

    adapted_answers = answers(adapted, params)
    assert adapted_answers == answers(plain, lora.merge(POLICY, params)[1])
    assert adapted_answers != answers(plain, lora.split(POLICY, params)[1])


IMAGES = "gemma3 with images"


def _saved(folder, pattern: str = "_proj", policy=tiny.POLICY):
    """Write random adapters in PEFT's format; return their policy and parameters."""
    config = dataclasses.replace(policy, lora=LoraConfig(3, 6.0, pattern))
    params = tiny.weights(config)
    lora.save(folder, config, params, "base", "qwen2")
    return config, params


@pytest.mark.parametrize("pattern", ["_proj", "q_proj|down"])
def test_loaded_adapters_are_those_that_were_saved(pattern: str, tmp_path) -> None:
    """Added to the base, they give the logits of base and adapters, in float32 and bfloat16."""
    config, params = _saved(tmp_path / "adapters", pattern)
    loaded, adapters = lora.load(tmp_path / "adapters", tiny.POLICY)
    assert loaded.lora is not None and loaded.lora.scale == 2.0
    flat = flatten_dict(lora.split(config, params)[0], sep="/")
    assert adapters.keys() == flat.keys()
    for path, value in flat.items():
        np.testing.assert_array_equal(adapters[path], value)
    base = jax.tree.map(jnp.asarray, lora.split(config, params)[1])
    sums = lora.add(loaded, base, adapters)
    np.testing.assert_allclose(
        logits(tiny.POLICY, sums, TOKENS), logits(config, params, TOKENS), atol=1e-4
    )
    assert np.abs(logits(tiny.POLICY, sums, TOKENS) - logits(tiny.POLICY, base, TOKENS)).max() > 0.1
    small = jax.tree.map(lambda x: x.astype(jnp.bfloat16), base)
    leaves = jax.tree.leaves(lora.add(loaded, small, adapters))
    assert all(leaf.dtype == jnp.bfloat16 for leaf in leaves)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, r"adapter_config\.json: peft_type must be LORA"),
        ({"use_dora": True}, "use_dora = True: not supported, must be absent"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = .*: not supported"),
        ({"bias": "all"}, "bias = 'all': not supported"),
        ({"r": 0}, "r = 0 and lora_alpha = 6.0: must be above 0"),
        ({"r": True}, "r = True and"),
        ({"lora_alpha": "x"}, "lora_alpha = 'x': must be above 0"),
        ({"r": 4}, r"has shape \(3, 48\), needs \(4, 48\)"),
    ],
)
def test_adapters_of_another_kind_are_refused(change: dict, message: str, tmp_path) -> None:
    _saved(tmp_path / "adapters")
    path = tmp_path / "adapters" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        lora.load(tmp_path / "adapters", tiny.POLICY)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 16}, "has shape .*, needs"),
        ({"layers": 1}, "in a layer below 1"),
        ({"layers": 3}, "must be there in all layers, A and B"),
        ({"experts": 4, "experts_per_token": 2}, "the policy has no such layer"),
    ],
)
def test_adapters_of_another_policy_are_refused(change: dict, message: str, tmp_path) -> None:
    _saved(tmp_path / "adapters")
    with pytest.raises(ValueError, match=message):
        lora.load(tmp_path / "adapters", dataclasses.replace(tiny.POLICY, **change))


def test_damaged_folders_of_adapters_are_refused(tmp_path) -> None:
    folder = tmp_path / "adapters"
    with pytest.raises(FileNotFoundError, match=r"adapter_config\.json: not there"):
        lora.load(folder, tiny.POLICY)
    _saved(folder)
    file = folder / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    name = min(tensors)
    for content, message in (
        ({n: t for n, t in tensors.items() if n != name}, "must be there in all layers"),
        (tensors | {name: np.full_like(tensors[name], np.nan)}, "values that are not finite"),
        (tensors | {"base_model.model.lm_head.lora_A.weight": tensors[name]}, "no such layer"),
        ({"x": np.zeros(1)}, "no such layer"),
    ):
        safetensors.numpy.save_file(content, file)
        with pytest.raises(ValueError, match=message):
            lora.load(folder, tiny.POLICY)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"adapter_model\.safetensors: not there"):
        lora.load(folder, tiny.POLICY)


@pytest.mark.slow
def test_adapters_made_by_peft_are_added(tmp_path) -> None:
    torch = pytest.importorskip("torch", reason=families.REASON)
    peft = pytest.importorskip("peft", reason="the comparison needs peft (extra 'test')")
    model = families.make("qwen2")
    model.save_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "up_proj"], init_lora_weights=False
    )
    peft_model = peft.get_peft_model(model, settings)
    peft_model.save_pretrained(tmp_path / "adapters")
    config, base = weights.load(tmp_path / "base")
    loaded, adapters = lora.load(tmp_path / "adapters", config)
    sums = lora.add(loaded, jax.tree.map(jnp.asarray, base), adapters)
    expected = peft_model(torch.tensor(TOKENS, dtype=torch.long)).logits.detach().numpy()
    np.testing.assert_allclose(logits(config, sums, TOKENS), expected, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "smollm3", "olmo2", "gemma3", IMAGES])
def test_saved_adapters_match_peft_logits_and_gradients(family: str, tmp_path) -> None:
    """PEFT reads the saved adapters: the same logits and gradients of the adapters."""
    torch = pytest.importorskip("torch", reason=families.REASON)
    peft = pytest.importorskip("peft", reason="the comparison needs peft (extra 'test')")
    model = families.make(family.removesuffix(" with images"))
    if family == IMAGES:
        model = families.with_images(model)
    model.save_pretrained(tmp_path / "base")
    base_type = json.loads((tmp_path / "base" / "config.json").read_text())["model_type"]
    config, base = weights.load(tmp_path / "base")
    config = dataclasses.replace(config, lora=LoraConfig(4, 6.0, "q_proj|o_proj|gate|down"))
    adapters, _ = lora.split(config, tiny.weights(config))
    lora.save(tmp_path / "adapters", config, adapters, str(tmp_path / "base"), base_type)
    peft_model = peft.PeftModel.from_pretrained(model, tmp_path / "adapters", is_trainable=True)

    def logprob(adapters):
        logprobs = jax.nn.log_softmax(transformer.logits(config, lora.join(adapters, base), TOKENS))
        return jnp.sum(jnp.take_along_axis(logprobs[:, :-1], TOKENS[:, 1:, None], axis=-1))

    ids = torch.tensor(TOKENS, dtype=torch.long)
    expected_logits = peft_model(ids).logits
    adapted_logits = logits(config, lora.join(adapters, base), TOKENS)
    np.testing.assert_allclose(adapted_logits, expected_logits.detach().numpy(), atol=2e-4)
    plain = logits(dataclasses.replace(config, lora=None), base, TOKENS)
    assert np.abs(adapted_logits - plain).max() > 0.1

    logprobs = expected_logits.log_softmax(-1)[:, :-1]
    logprobs.gather(-1, ids[:, 1:, None]).sum().backward()
    gradients = jax.jit(jax.grad(logprob))(adapters)
    lora.save(tmp_path / "gradients", config, gradients, base_type=base_type)
    gradients = safetensors.numpy.load_file(tmp_path / "gradients" / "adapter_model.safetensors")
    peft_params = {name: p for name, p in peft_model.named_parameters() if p.requires_grad}
    assert len(peft_params) == len(gradients) == config.layers * 8
    for name, gradient in gradients.items():
        expected_gradient = peft_params[name.replace(".weight", ".default.weight")].grad.numpy()
        np.testing.assert_allclose(
            gradient, expected_gradient, atol=1e-3 * np.abs(expected_gradient).max()
        )
