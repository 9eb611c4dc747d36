"""A sweep over config fields as an XManager experiment, on this machine or on Vertex AI.

    pip install -e '.[xmanager]'
    python -m launch.xmanager --executor=local --config=configs/tiny.py --workdir=runs/sweep \
        --sweep=seed=0,1,2 --sweep=optimizer.learning_rate=1e-4,2e-4 [--config.steps=20 ...]
    python -m launch.xmanager --executor=vertex --accelerator=a100=8 --workdir=/gcs/BUCKET/sweep ...

1. Every --sweep gives a field its values, apart by commas (those inside brackets belong to a value:
   --sweep=algorithm.documents=(2,),(2,3)). Each choice of a value a field is a work unit.
2. A work unit is `python -m spell_jax.train` with plain --config.a.b=value flags and a workdir of
   its own, WORKDIR/NNN-field=value. Started again, it goes on where its checkpoint stands.
3. The config of every unit is checked before anything starts: fields, types, ranges.
4. local: the units run on this machine, one after another, for they may want all of its devices.
   The exit status is 1 if one failed; the others run all the same.
5. vertex: the files that git tracks are put into an image, on --base_image, with the extra of the
   accelerator; the units are handed to Vertex AI and not waited for. Its disks do not outlive a
   job: workdir and folders must lie in buckets, which are mounted under /gcs/.

`xmanager launch` finds a script by its file's name, which here is that of the package itself:
start this one as a module, as above. XManager's own flags (--xm_...) can be given too. What Vertex
AI does not rent through XManager, newer TPUs for one, is what tpu_vm.py is for.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import itertools
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import app, flags
from ml_collections import config_flags

from configs import tiny
from spell_jax.learner import loss, update
from spell_jax.runtime.config import Config, build
from spell_jax.sampler.engine import SamplerConfig
from spell_jax.trainer import build as catalogue

CHECKOUT = pathlib.Path(__file__).resolve().parent.parent
# What is true of a work unit that has not failed.
EXECUTORS = {"local": "done", "vertex": "handed to Vertex AI"}
MOUNT = "/gcs/"  # where Vertex AI mounts buckets
# What XManager 0.8.5 finds a machine for, and the extra that JAX needs there. Of others it either
# knows no machine (TPUs from v4 on) or asks for one that does not have them (H100 in an N1).
EXTRAS = {
    **dict.fromkeys(("tpu_v2", "tpu_v3"), "tpu"),
    **dict.fromkeys(("p100", "v100", "t4", "l4_24th", "a100"), "gpu"),
}
_LONGEST_NAME = 120  # characters of a workdir's name; file systems end at 255 bytes
_OVERRIDE = re.compile(r"--config\.([\w.]+)=(.*)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class WorkUnit:
    """One training run of the experiment.

    Attributes:
      name: of its workdir, such as "001-seed=1".
      flags: of `python -m spell_jax.train`.
    """

    name: str
    flags: tuple[str, ...]


# ------------------------------------------------------------------------------------------- Sweep


def parse_sweep(texts: Sequence[str]) -> dict[str, list[str]]:
    """["seed=0,1", "algorithm.documents=(2,),(2,3)"] as field -> values, all texts, in this order.

    Raises:
      ValueError: a text is not FIELD=VALUE,VALUE..., or a field or one of its values comes twice.
    """
    sweep: dict[str, list[str]] = {}
    for text in texts:
        field, equals, values = text.partition("=")
        if not equals or not re.fullmatch(r"[\w.]+", field):
            raise ValueError(f"sweep = {text!r}: must be FIELD=VALUE,VALUE...")
        if field in sweep:
            raise ValueError(f"sweep = {text!r}: must give all values of {field} at once")
        sweep[field] = _split(values)
        if len(set(sweep[field])) < len(sweep[field]) or "" in sweep[field]:
            raise ValueError(f"sweep = {text!r}: must be values that differ, none of them empty")
    return sweep


def _split(values: str) -> list[str]:
    """At the commas that stand outside of brackets."""
    parts, depth = [""], 0
    for character in values:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def work_units(
    config: str, workdir: str, sweep: Mapping[str, Sequence[str]], overrides: Sequence[str]
) -> list[WorkUnit]:
    """The Cartesian product of the sweep; its last field changes fastest.

    Args:
      config: file of a config.
      workdir: the experiment's.
      sweep: field -> values.
      overrides: --config.a.b=value flags of all units.

    Raises:
      ValueError: an override is something else, or of a field that is swept.
    """
    for override in overrides:
        found = _OVERRIDE.fullmatch(override)
        if not found:
            raise ValueError(
                f"{override}: must be --config.FIELD=VALUE, or a flag of this launcher"
            )
        if found[1] in sweep:
            raise ValueError(f"{override}: must not be given, {found[1]} is swept")
    units = []
    for index, values in enumerate(itertools.product(*sweep.values())):
        chosen = [f"{field}={value}" for field, value in zip(sweep, values, strict=True)]
        name = re.sub(r"[^\w.=+-]+", "_", "-".join([f"{index:03}", *chosen]))[:_LONGEST_NAME]
        run = (f"--config={config}", f"--workdir={workdir.rstrip('/')}/{name}")
        units.append(WorkUnit(name, (*run, *overrides, *(f"--config.{one}" for one in chosen))))
    return units


# ------------------------------------------------------------------------------------------- Checks


def read_config(unit: WorkUnit) -> Config:
    """The config as `spell_jax.train` will have it.

    Raises:
      ValueError: naming the field that is unknown or of the wrong type, or the file.
    """
    first, *others = (flag for flag in unit.flags if flag.startswith("--config"))
    file = first.removeprefix("--config=")
    if not pathlib.Path(file).is_file():
        raise ValueError(f"config = {file!r}: must be a file of configs/")
    config = _parse(first)
    for flag in others:
        field, _, value = flag.removeprefix("--config.").partition("=")
        section: Any = config
        for part in field.split("."):
            if not hasattr(section, "items") or part not in section:
                known = f", must be one of {sorted(section)}" if hasattr(section, "items") else ""
                raise ValueError(f"{field} = {value}: no such field in the config{known}")
            section = section[part]
    return _parse(first, *others)


def _parse(*given: str) -> Config:
    values, arguments = flags.FlagValues(), ["launch.xmanager", *given]
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=arguments)
    try:
        values(arguments)
        return values["config"].value
    except (flags.Error, OSError, ImportError, TypeError, AttributeError) as error:
        raise ValueError(f"{' '.join(given)}: {error}") from error


def check(config: Config, executor: str) -> None:
    """Finds mistakes that can be found without devices; on Vertex AI, buckets are not looked into.

    Raises:
      ValueError, FileNotFoundError: naming the field, its value and what would be right.
    """
    if "algorithm" not in config:
        raise ValueError("algorithm: is missing; must be a config of spell_jax.train")
    build(SamplerConfig, config.sampler, "sampler")
    build(update.PackingConfig, config.packing, "packing")
    build(loss.LossConfig, config.loss, "loss")
    build(update.OptimizerConfig, config.optimizer, "optimizer", total_steps=config.steps)
    if executor == "local":
        catalogue.check(config)
        catalogue.find_policy(config)
        return
    paths = {f"data.{name}": config.data[name] for name in ("source", "questions", "validation")}
    paths |= {f"{name}.folder": config[name].folder for name in catalogue.model_sections(config)}
    for field, path in paths.items():
        if path not in ("", "tiny", *catalogue.GENERATED) and not path.startswith(MOUNT):
            raise ValueError(f"{field} = {path!r}: must be below {MOUNT}, for executor = 'vertex'")
    if missing := [field for field, path in paths.items() if field.endswith("folder") and not path]:
        raise ValueError(f"{missing[0]} = '': must be 'tiny' or below {MOUNT}")
    if not config.data.source and not config.data.questions:
        raise ValueError(f"data.source = '': must be 'tiny' or below {MOUNT}")
    catalogue.check_algorithm(config.algorithm)
    if any(path.startswith(MOUNT) for path in paths.values()):
        with config.unlocked():  # what can be looked at here is the rest
            config.data, config.algorithm = tiny.get_config().data, tiny.get_config().algorithm
    catalogue.check(config)


def requirements(executor: str, accelerator: str, cpu: int, ram_gib: int) -> dict[str, int]:
    """What a work unit asks of its machine, as XManager names it (RAM in bytes).

    Args:
      executor: one of EXECUTORS.
      accelerator: NAME=COUNT with a name of EXTRAS; "": none.
      cpu, ram_gib: at least so much; 0: as it comes.

    Raises:
      ValueError: it is not known, or asked of this machine.
    """
    if executor == "local":
        for field, value in {"accelerator": accelerator, "cpu": cpu, "ram_gib": ram_gib}.items():
            if value:
                raise ValueError(f"{field} = {value!r}: must not be given for executor = 'local'")
        return {}
    wanted = {name: value for name, value in (("cpu", cpu), ("ram", ram_gib * 2**30)) if value}
    if accelerator:
        name, _, count = accelerator.partition("=")
        if name not in EXTRAS or not re.fullmatch("[1-9][0-9]*", count):
            raise ValueError(
                f"accelerator = {accelerator!r}: must be NAME=COUNT with one of {sorted(EXTRAS)}"
            )
        wanted[name] = int(count)
    return wanted


# ------------------------------------------------------------------------------------------- Launch


@contextlib.contextmanager
def copied_checkout() -> Iterator[pathlib.Path]:
    """A folder with the files that git tracks, as they are now: no runs, no environments."""
    command = ["git", "-C", str(CHECKOUT), "ls-files", "-z"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "spell_jax_checkout"
        for name in filter(None, names):
            if (CHECKOUT / name).is_file():  # else: removed, but not yet in git's index
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(CHECKOUT / name, copy / name)
        yield copy


def program(xm: Any, xm_local: Any) -> Any:
    """The trainer under this Python, for XManager to package."""
    return xm.Packageable(
        executable_spec=xm.Binary(path=sys.executable),
        executor_spec=xm_local.Local.Spec(),
        args=["-m", "spell_jax.train"],
    )


def image(xm: Any, xm_local: Any, checkout: pathlib.Path, base_image: str, extra: str) -> Any:
    """The trainer in an image, for XManager to package; `extra` is one of setup.py's, or ""."""
    package = f".[{extra}]" if extra else "."
    spec = xm.PythonContainer(
        path=str(checkout),
        base_image=base_image,
        # The entry point is put into the last WORKDIR, and so starts where configs/ is.
        docker_instructions=[
            f"COPY {checkout.name}/ /{checkout.name}",
            f"WORKDIR /{checkout.name}",
            f"RUN python -m pip install -e '{package}'",
        ],
        entrypoint=xm.CommandList(['python -m spell_jax.train "$@"']),
    )
    return xm.Packageable(executable_spec=spec, executor_spec=xm_local.Vertex.Spec())


async def launch(
    experiment: Any, job: Any, units: Sequence[WorkUnit], wait: bool
) -> list[tuple[str, str]]:
    """Adds every unit to an open experiment; `wait`: each is over before the next one begins.

    Args:
      experiment: of XManager.
      job: makes XManager's job of a unit's flags.
      units: in the order of their start.

    Returns:
      (name, error) of the units that failed; [] without waiting.
    """
    failed = []
    for unit in units:
        print(f"{unit.name}: python -m spell_jax.train {' '.join(unit.flags)}", flush=True)
        added = await experiment.add(job(list(unit.flags)))
        if wait:
            try:
                await added.wait_until_complete()
            except Exception as error:  # XManager gives on what the executor raised
                failed.append((unit.name, str(error)))
    return failed


async def run(
    title: str, executor: str, units: Sequence[WorkUnit], wanted: dict[str, int], base_image: str
) -> list[tuple[str, str]]:
    """The whole experiment; returns the (name, error) of the units that failed."""
    # By name, because the extra need not be installed where types are checked.
    xm: Any = importlib.import_module("xmanager.xm")
    xm_local: Any = importlib.import_module("xmanager.xm_local")
    machine = {"local": xm_local.Local, "vertex": xm_local.Vertex}[executor]
    failed: list[tuple[str, str]] = []
    try:
        async with xm_local.create_experiment(experiment_title=title) as experiment:
            if executor == "local":
                [executable] = experiment.package([program(xm, xm_local)])
            else:
                extra = next((EXTRAS[name] for name in wanted if name in EXTRAS), "")
                with copied_checkout() as checkout:
                    made = image(xm, xm_local, checkout, base_image, extra)
                    [executable] = experiment.package([made])

            def job(flags: list[str]) -> Any:
                asked = xm.JobRequirements(**wanted)
                return xm.Job(executable=executable, executor=machine(asked), args=flags)

            failed += await launch(experiment, job, units, wait=executor == "local")
    except Exception:
        if not failed:  # what a unit raised is raised once more when the experiment is left
            raise
    return failed


def plan(given: Any, overrides: Sequence[str]) -> tuple[list[WorkUnit], dict[str, int]]:
    """The checked work units and what each asks of its machine, from the launcher's flags.

    Raises:
      ValueError, FileNotFoundError: naming the field, its value and what would be right.
    """
    if given.executor == "vertex" and not given.workdir.startswith(MOUNT):
        raise ValueError(
            f"workdir = {given.workdir!r}: must be below {MOUNT}, for executor = 'vertex'"
        )
    units = work_units(given.config, given.workdir, parse_sweep(given.sweep), overrides)
    for unit in units:
        check(read_config(unit), given.executor)
    return units, requirements(given.executor, given.accelerator, given.cpu, given.ram_gib)


def main(argv: Sequence[str]) -> None:
    given = flags.FLAGS
    try:
        units, wanted = plan(given, argv[1:])
    except (FileNotFoundError, ValueError) as error:
        sys.exit(str(error))
    title = f"{pathlib.Path(given.config).stem} {' '.join(given.sweep)}".strip()
    failed = asyncio.run(run(title, given.executor, units, wanted, given.base_image))
    for name, error in failed:
        print(f"{name} failed: {error}", file=sys.stderr)
    print(f"{len(units) - len(failed)} of {len(units)} work units are {EXECUTORS[given.executor]}")
    sys.exit(bool(failed))


def parse_flags(argv: Sequence[str]) -> list[str]:
    """Reads the launcher's and XManager's flags; those of the config are left for the units."""
    of_config = [flag for flag in argv if flag.startswith("--config.")]
    others = [flag for flag in argv if not flag.startswith("--config.")]
    return flags.FLAGS(others) + of_config


if __name__ == "__main__":
    try:
        importlib.import_module("xmanager.xm_local")  # defines its flags
    except ImportError as error:
        sys.exit(f"XManager is not installed ({error}): pip install -e '.[xmanager]'")
    flags.DEFINE_enum("executor", None, list(EXECUTORS), "Where the work units run.", required=True)
    flags.DEFINE_string("config", None, "File of the config.", required=True)
    flags.DEFINE_string("workdir", None, "The experiment's folder.", required=True)
    flags.DEFINE_multi_string("sweep", [], "FIELD=VALUE,VALUE...; can be repeated.")
    flags.DEFINE_string("accelerator", "", "NAME=COUNT, such as a100=8 or tpu_v3=8.")
    flags.DEFINE_integer("cpu", 0, "Cores of a machine, at least.", lower_bound=0)
    flags.DEFINE_integer("ram_gib", 0, "Memory of a machine in GiB, at least.", lower_bound=0)
    flags.DEFINE_string("base_image", "python:3.11", "What the image is made on.")
    app.run(main, flags_parser=parse_flags)
