"""Flags of the commands that sample a policy and ask a judge; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from absl import app, flags

from spell_jax.policy.choices import DTYPES
from spell_jax.selfplay.verdicts import JUDGE_TEMPLATES

# Sampler sizes that depend on the machine's memory (text_model.SIZES). They stand here, because
# --help must not wait for the import of JAX.
SIZES: dict[str, Any] = {"kv_cache_tokens": 65_536, "slots": 512, "prefill_tokens": 8192}

JUDGMENTS = ("outcome", "diversity", "errors")  # of spell_jax.evaluate --judgment
# Modules of flags that every command has, such as --verbosity and --debug.
_GENERAL = ("absl.", "spell_jax.runtime.")


def define_flags() -> None:
    """Define the flags of the judge and of the policies that are sampled."""
    flags.DEFINE_string("judge_url", "", "URL of the judge's OpenAI-compatible API.")
    flags.DEFINE_string("judge_model", "", "Model name of the judge at --judge_url.")
    flags.DEFINE_string("judge_policy", "", "Policy folder of a local judge.")
    flags.DEFINE_enum(
        "judge_template",
        "yes_no",
        list(JUDGE_TEMPLATES),
        "Verdicts of the judge: yes or no, or EAPO's three grades.",
    )
    flags.DEFINE_integer("judge_max_tokens", 8192, "Maximum length of a judge's reply in tokens.")
    flags.DEFINE_integer("judge_workers", 16, "Maximum number of concurrent requests to the judge.")
    flags.DEFINE_float("judge_rate", 0.0, "Maximum requests to the judge per second; 0: no limit.")
    flags.DEFINE_enum("dtype", "float32", list(DTYPES), "Dtype of the policies' weights.")
    flags.DEFINE_integer(
        "kv_cache_tokens",
        SIZES["kv_cache_tokens"],
        "KV cache capacity in tokens per row shard of the mesh, besides one prompt and answer.",
    )
    flags.DEFINE_integer("slots", SIZES["slots"], "Maximum number of answers decoded at once.")
    flags.DEFINE_integer(
        "prefill_tokens",
        SIZES["prefill_tokens"],
        "Maximum number of prompt tokens per prefill call.",
    )


def check_model(flag_values: Any, name: str, needed_for: str = "") -> bool:
    """Return whether --NAME_url and --NAME_model, or --NAME_policy, name a model.

    Raises UsageError if only one of the first two is given, or also the third; and with
    `needed_for`, such as "--rule=judge", if no flag is given.
    """
    url, model, policy = (
        getattr(flag_values, f"{name}_{part}") for part in ("url", "model", "policy")
    )
    if bool(url) != bool(model) or (url and policy):
        raise app.UsageError(
            f"--{name}_url and --{name}_model go together, without --{name}_policy"
        )
    if needed_for and not (url or policy):
        needs = f"--{name}_url and --{name}_model, or --{name}_policy, must be given"
        raise app.UsageError(f"{needed_for}: {needs}")
    return bool(url or policy)


def refuse(flag_values: flags.FlagValues, names: Iterable[str], where: str) -> None:
    """Raise UsageError for the first of the flags `names` that the command line gives.

    `where` says when the flag has no effect, such as "with --lengths".
    """
    for name in names:
        if flag_values[name].present:
            raise app.UsageError(f"--{name}: has no effect {where}, must not be given")


def refuse_others(flag_values: flags.FlagValues, useful: Collection[str], where: str) -> None:
    """Raise UsageError for a flag of the command that is given and not `useful`; see `refuse`."""
    command_flags = (
        name
        for name in flag_values
        if not str(flag_values.find_module_defining_flag(name)).startswith(_GENERAL)
    )
    refuse(flag_values, [name for name in command_flags if name not in useful], where)
