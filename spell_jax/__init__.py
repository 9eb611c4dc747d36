"""spell_jax: self-play reinforcement learning for long-context language models, in JAX."""
