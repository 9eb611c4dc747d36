"""Values of flags and config fields that name how a model runs; imports nothing heavy.

Commands answer `--help` and a mistake in a flag without importing jax.
"""

from __future__ import annotations

DTYPES = ("float32", "bfloat16")
COMPUTE_DTYPES = ("auto", *DTYPES)  # "auto": see products.resolve_dtype
BASE_DTYPES = ("compute", "int8")  # of the weights that LoRA does not train
ROPE_SCALINGS = ("", "linear", "yarn")
# Thinking mode of chat templates that have one -> `thinking` of tokenizer.load().
THINKING = {"": None, "on": True, "off": False}
