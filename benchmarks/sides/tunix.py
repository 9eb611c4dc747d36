"""Tunix's side: GRPOLearner on an RLCluster with its "vanilla" sampler, all on one device.

The same weights sample and train. beta = 0 keeps the reference policy out.
"""

from __future__ import annotations

import importlib
from typing import Any

from benchmarks.sides import contract


def train(options: contract.SideOptions) -> contract.Numbers:
    """Time the steps of Tunix."""
    import jax
    import optax
    from flax import nnx

    names = ("rl.rl_cluster", "rl.grpo.grpo_learner", "rl.rollout.base_rollout", "sft.hooks")
    modules: Any = [importlib.import_module(f"tunix.{name}") for name in names]
    rl_cluster, grpo_learner, base_rollout, hooks = modules
    mesh = jax.sharding.Mesh([[jax.devices()[0]]], ("fsdp", "tp"))
    roles = rl_cluster.Role
    steps = 1 + options.steps
    tokens = options.prompt + options.response  # the cache has no room to spare: decoding reads all
    cluster = rl_cluster.RLCluster(
        actor=make_model(options),
        tokenizer=contract.make_tokenizer(options.vocab),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys((roles.ACTOR, roles.REFERENCE, roles.ROLLOUT), mesh),
            rollout_engine="vanilla",
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.chain(
                    optax.clip_by_global_norm(1.0), optax.adamw(2e-6, weight_decay=0.01)
                ),
                eval_every_n_steps=steps + 1,  # never
                max_steps=steps,
                mini_batch_size=options.groups,
                train_micro_batch_size=options.micro,
                rollout_micro_batch_size=options.groups,
                compute_logps_micro_batch_size=options.groups,
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=options.response,
                max_prompt_length=options.prompt,
                kv_cache_size=tokens,
                temperature=1.0,
                top_p=1.0,
                top_k=None,
            ),
        ),
    )
    clock = contract.Clock()

    def reward(prompts, completions, **_) -> list[float]:
        clock.generate_ends()
        return contract.random_rewards(completions, options.response)

    nothing = dict.fromkeys(hooks.TrainingHooks.__abstractmethods__, lambda *_: None)
    ends = {"on_train_end": lambda *_: clock.update_ends()}
    cluster.actor_trainer.with_training_hooks(
        type("Ends", (hooks.TrainingHooks,), nothing | ends)()
    )
    learner = grpo_learner.GRPOLearner(
        rl_cluster=cluster,
        algo_config=grpo_learner.GRPOConfig(num_generations=options.group, beta=0.0),
        reward_fns=reward,
    )
    words = contract.texts(options.prompts())
    batches = [words[i : i + options.groups] for i in range(0, len(words), options.groups)]
    clock.steps_begin()
    learner.train([{"prompts": batch} for batch in batches])
    weights = nnx.state(cluster.actor_trainer.model, nnx.Param)
    return contract.Numbers(
        **clock.seconds(),
        peak_bytes=contract.peak_bytes(),
        parameters=sum(leaf.size for leaf in jax.tree.leaves(weights)),
        versions=contract.versions("google-tunix", "jax", "flax", "optax"),
        differences=[
            f"generation and update repeat each prompt {options.group} times",
            "prefill and update ask for logits of prompt tokens too",
            "attention computes scores of all pairs of tokens, and in decoding of the whole cache",
        ],
    )


def make_model(options: contract.SideOptions) -> Any:
    """Make Tunix's Qwen2 of a config.json with random weights.

    Matrices are sampled again with the standard deviation .02.
    """
    # Tunix expects trained weights: with its own, of deviation 1 and 0, each token is followed by
    # itself and gradients are about 1e-23.
    import jax
    import jax.numpy as jnp
    from flax import nnx

    model: Any = importlib.import_module("tunix.models.qwen2.model")
    shape = options.shape()
    policy = model.Qwen2(
        model.ModelConfig(
            num_layers=shape["num_hidden_layers"],
            vocab_size=shape["vocab_size"],
            embed_dim=shape["hidden_size"],
            hidden_dim=shape["intermediate_size"],
            num_heads=shape["num_attention_heads"],
            head_dim=shape["head_dim"],
            num_kv_heads=shape["num_key_value_heads"],
            rope_theta=int(shape["rope_theta"]),
            norm_eps=shape["rms_norm_eps"],
            use_tied_embedding=shape["tie_word_embeddings"],
            remat_config=model.RematConfig.NONE,
            dtype=jnp.dtype(options.dtype),
            param_dtype=jnp.float32,
        ),
        rngs=nnx.Rngs(0),
    )
    keys = nnx.Rngs(1)

    def draw(leaf):
        return leaf if leaf.ndim < 2 else 0.02 * jax.random.normal(keys(), leaf.shape, leaf.dtype)

    nnx.update(policy, jax.tree.map(draw, nnx.state(policy, nnx.Param)))
    return policy


if __name__ == "__main__":
    contract.main(train)
