"""Architectures of the speed measurements, with random weights."""

from __future__ import annotations

from spell_jax.policy.config import PolicyConfig

# From the config.json files of their authors on Hugging Face.
QWEN_05B = PolicyConfig(151_936, 896, 24, 14, 2, 64, 4864)
QWEN_15B = PolicyConfig(151_936, 1536, 28, 12, 2, 128, 8960)
QWEN_7B = PolicyConfig(152_064, 3584, 28, 28, 4, 128, 18_944, tied_embeddings=False)
SMOLLM2 = PolicyConfig(49_152, 576, 30, 9, 3, 64, 1536, qkv_bias=False)
TINY = PolicyConfig(512, 64, 2, 2, 1, 32, 128)
