"""Values of flags and config fields that name how a model runs; imports nothing heavy.

Commands answer `--help` and a mistake in a flag without importing jax.
"""

from __future__ import annotations

COMPUTE_DTYPES = ("float32", "bfloat16")
ROPE_SCALINGS = ("", "linear", "yarn")
# Thinking mode of chat templates that have one -> `thinking` of tokenizer.load().
THINKING = {"": None, "on": True, "off": False}
