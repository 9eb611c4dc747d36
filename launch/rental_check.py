"""Check a training command for a slice that is not rented yet (launch.tpu_vm watch).

Fields, devices and memory are checked as by launch.check; the config's file and modules of the
user's must be committed, because the slice gets a copy of HEAD. Other files that the run reads are
where it will run, so they are not looked for here. Memory needs the policy's shape: of a
config.json that is named or in the policy's folder, or of a well-known model by the folder's name.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import re
import subprocess
from collections.abc import Iterator, Sequence

import jax
from absl import flags

from spell_jax.config import collect_mistakes
from spell_jax.data.config import is_generated
from spell_jax.launch import aot, check, device_checks
from spell_jax.learner.loss_config import LossConfig
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import entry, hooks
from spell_jax.runtime.config import Config
from spell_jax.runtime.files.remote import FetchError

TRAINING = ("-m", "spell_jax.train")  # arguments of Python before the flags of a training run
HOOKS = ("algorithm.reward", "algorithm.evaluation", "data.source")  # may name a module


def find_mistakes(command: Sequence[str], topology: str, shape: str = "") -> list[str]:
    """Return a line for each mistake in a command, including too little memory on the slice.

    Args:
      command: arguments of Python. Only the arguments of `-m spell_jax.train` are checked.
      topology: name of the slice.
      shape: the policy's config.json; "" if the shape is known by config.policy.folder.
    """
    jax.config.update("jax_platforms", "cpu")  # a few small arrays; no TPU is claimed for them
    if tuple(command[:2]) != TRAINING:
        return []
    try:
        mistakes = [*_check_flags(command[2:])]
        config = entry.load_config(command[2:])
    except entry.USER_ERRORS as error:
        return [str(error)]
    return mistakes + check_fields(config, topology, shape).mistakes + [*_check_modules(config)]


def _check_flags(arguments: Sequence[str]) -> Iterator[str]:
    """Yield a line for an unknown flag, and for a workdir that does not outlive the slice."""
    values = flags.FlagValues()
    flags.DEFINE_string("workdir", None, "", flag_values=values)
    _, *arguments = values(["", *arguments], known_only=True)
    for argument in arguments:
        flag, _, value = argument.partition("=")
        name = flag.lstrip("-")
        path = value.partition(":")[0]
        if flag == "--config" and os.path.exists(path) and not _is_committed(path):
            yield f"--config = {value!r}: {path} must be committed, the slice gets a copy of HEAD"
        if flag == name or re.fullmatch(r"(no)?config(\..*)?", name) or name in flags.FLAGS:
            continue
        if flag != entry.DEBUG:
            yield f"{flag}: no such flag of spell_jax.train"
    if not re.match(r"\w+://|/", values.workdir or ""):
        yield (
            f"--workdir = {values.workdir!r}: must be in a bucket (gs://BUCKET/RUN) or on a "
            "mounted disk (/...), because a preempted slice loses its own files"
        )


def _check_modules(config: Config) -> Iterator[str]:
    """Yield a line for each module that a field names and that the copy of HEAD would lack."""
    fields = config.to_dict()
    for field in HOOKS:
        section, _, name = field.partition(".")
        value = fields.get(section, {}).get(name)
        if not isinstance(value, str) or not hooks.is_hook(value):
            continue
        with hooks.no_exit(f"{field} = {value!r}: "):
            spec = importlib.util.find_spec(value.partition(":")[0])
        if spec and spec.origin and not _is_committed(spec.origin):
            yield (
                f"{field} = {value!r}: {spec.origin} must be committed here, the slice gets a copy "
                "of HEAD"
            )


def _is_committed(path: str) -> bool:
    """Return whether git has a file, or the file belongs to an installed package."""
    if "site-packages" in path:
        return True
    listing = subprocess.run(["git", "ls-files", "--error-unmatch", path], capture_output=True)
    return listing.returncode == 0


def check_fields(config: Config, topology: str, shape: str = "") -> check.Checked:
    """Check fields, devices and memory of a run; arguments are as of `find_mistakes`."""
    run, mistakes = collect_mistakes(_without_files(config))
    checked = check.Checked(config, run, {field.partition(".")[0] for field in mistakes})
    if run is None:
        checked.mistakes += mistakes.values()
        return checked
    of_data = [line for field, line in mistakes.items() if field.startswith("data.")]
    checked.mistakes += [line for line in mistakes.values() if line not in of_data]
    attempt = checked.attempt
    if "policy" not in checked.wrong:
        checked.policy = attempt("policy.folder", _read_policy, config, shape)
    attempt("loss", LossConfig.check_policy, checked.section("loss"), checked.policy)
    check.check_devices(checked, topology)
    if not checked.mistakes:
        checked.plan = attempt("mesh", check.plan_memory, checked, run)
        attempt("mesh", device_checks.check_memory, checked.plan)
    checked.mistakes += of_data  # the memory does not depend on data
    return checked


def _read_policy(config: Config, shape: str) -> PolicyConfig:
    try:
        return aot.read_policy(config, shape)
    except FetchError as error:
        raise ValueError(f"{error}; or name the model's config.json by --policy") from error


def _without_files(config: Config) -> Config:
    """Return a copy whose files and packages need not be on this machine."""
    copied = copy.deepcopy(config)
    data = copied.get("data", {})
    if data.get("source") and not is_generated(data.source):
        data.source = "."
    for name in ("questions", "validation"):
        if data.get(name):
            data[name] = __file__
    copied.update(init_from="", wandb="")
    return copied
