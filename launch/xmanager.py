"""Run a sweep over config fields as an XManager experiment, on this machine or on Vertex AI.

    pip install -e '.[xmanager]'
    python -m launch.xmanager --executor=local --config=configs/tiny.py --workdir=runs/sweep \\
        --sweep=seed=0,1,2 --sweep=optimizer.learning_rate=1e-4,2e-4 [--config.steps=20 ...]
    python -m launch.xmanager --executor=local --experiment=spell-table-2 --workdir=runs/papers
    python -m launch.xmanager --executor=vertex --accelerator=a100=8 --workdir=/gcs/BUCKET/sweep ...

1. Each --sweep lists the values of one field, separated by commas. Commas inside brackets belong to
   a value: --sweep=algorithm.questioner.documents=(2,),(2,3). The work units are the product.
   With --experiment, a table or figure of the papers (python -m launch.experiments), they are the
   runs of its rows, on models and data below the folder --inputs.
2. A work unit is `python -m spell_jax.train` with plain --config.a.b=value flags and a workdir of
   its own, WORKDIR/NNN-field=value, or WORKDIR/NAME of an experiment's run. If it is started again,
   it resumes from its checkpoint.
3. The config of every unit is checked before anything starts: fields, types, ranges.
4. local: the units run one after another, because each may need all devices. If a unit fails, the
   next unit still runs and the exit status is 1.
5. vertex: the files tracked by git go into an image based on --base_image, with the accelerator's
   pip extra. The launcher does not wait for the units. Vertex AI's disks do not outlive a job, so
   the workdir and all folders must be in buckets, which are mounted under /gcs/.

Start this file as a module, as above: `xmanager launch` finds a script by its file name, which here
equals the name of the xmanager package. XManager's own flags (--xm_...) are accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

from spell_jax.config import collect_mistakes, model_sections
from spell_jax.data.config import is_generated
from spell_jax.data.tfds_sets import is_tfds
from spell_jax.launch.aot import split_outside_brackets
from spell_jax.launch.experiments import registry as experiments
from spell_jax.policy.model import find_folder
from spell_jax.runtime import entry
from spell_jax.runtime.config import Config, ConfigError

CHECKOUT = pathlib.Path(__file__).resolve().parent.parent
# Executor -> final state of a work unit that did not fail, for the summary line.
EXECUTORS = {"local": "done", "vertex": "handed to Vertex AI"}
MOUNT = "/gcs/"  # where Vertex AI mounts buckets
# Accelerators that XManager 0.8.5 can find a machine for, and the pip extra that JAX needs there.
# For others it knows no machine (TPUs from v4 on) or requests one without them (H100 in an N1).
EXTRAS = {
    **dict.fromkeys(("tpu_v2", "tpu_v3"), "tpu"),
    **dict.fromkeys(("p100", "v100", "t4", "l4_24th", "a100"), "gpu"),
}
_DATA_PATHS = ("data.source", "data.questions", "data.validation")
_LONGEST_NAME = 120  # characters of a workdir's name; file systems end at 255 bytes


class WorkUnit(NamedTuple):
    """One training run of the experiment."""

    name: str  # of its workdir, such as "001-seed=1"
    flags: tuple[str, ...]  # of `python -m spell_jax.train`


# ------------------------------------------------------------------------------------------- Sweep


def parse_sweep(texts: Sequence[str]) -> dict[str, list[str]]:
    """Parse ["seed=0,1", "algorithm.questioner.documents=(2,),(2,3)"] to field -> values as texts.

    Raises ValueError if a text has another form, or if a field or a value occurs twice.
    """
    sweep: dict[str, list[str]] = {}
    for text in texts:
        field, equals, values = text.partition("=")
        if not equals or not re.fullmatch(r"[\w.]+", field):
            raise ValueError(f"sweep = {text!r}: must be FIELD=VALUE,VALUE...")
        if field in sweep:
            raise ValueError(f"sweep = {text!r}: must give all values of {field} at once")
        sweep[field] = split_outside_brackets(values)
        if len(set(sweep[field])) < len(sweep[field]) or "" in sweep[field]:
            raise ValueError(f"sweep = {text!r}: must be distinct values, none of them empty")
    return sweep


def work_units(
    config: str, workdir: str, sweep: Mapping[str, Sequence[str]], overrides: Sequence[str]
) -> list[WorkUnit]:
    """Make the work units: the Cartesian product of the sweep; the last field varies fastest.

    `workdir` is the experiment's. `overrides` are flags for all units; ValueError if a flag is not
    --config.a.b=value, or if the flag's field is swept.
    """
    # Of two equal flags the last wins: an override of a swept field would be ignored silently.
    _check_overrides(overrides, sweep, "is swept")
    units = []
    for index, values in enumerate(itertools.product(*sweep.values())):
        settings = [f"{field}={value}" for field, value in zip(sweep, values, strict=True)]
        # The index keeps names apart that are equal once they are cut and replaced.
        name = re.sub(r"[^\w.=+-]+", "_", "-".join([f"{index:03}", *settings]))[:_LONGEST_NAME]
        run = (f"--config={config}", f"--workdir={workdir.rstrip('/')}/{name}")
        units.append(
            WorkUnit(name, (*run, *overrides, *(f"--config.{setting}" for setting in settings)))
        )
    return units


def experiment_units(
    name: str, workdir: str, inputs: str, overrides: Sequence[str]
) -> list[WorkUnit]:
    """Make the work units of a table or figure of the papers: its runs, each once.

    `inputs` is the folder of their models and data. ValueError if there is no such experiment, it
    has no runs, a run sets the field of an override, or an environment variable has no value.
    """
    experiment = experiments.find(name)
    if not experiment.runs:
        raise ValueError(f"experiment = {name!r}: must have runs; {experiment.note}")
    override_fields = [
        override.partition("=")[0].removeprefix("--config.") for override in overrides
    ]
    units = []
    for run in experiment.runs:
        # An override may stand for an environment variable, such as the address of the judge.
        fixed_fields = [field for field, value in run.fields.items() if not value.startswith("$")]
        _check_overrides(overrides, {*run.inputs, *fixed_fields}, f"is set by {run.name}")
        filled_run = run.with_variables(override_fields)
        units.append(WorkUnit(run.name, (*filled_run.flags(workdir, inputs), *overrides)))
    return units


def _check_overrides(overrides: Sequence[str], fields: Collection[str], reason: str) -> None:
    for override in overrides:
        match = re.fullmatch(r"--config\.([\w.]+)=.*", override, re.DOTALL)
        if not match:
            raise ValueError(f"{override}: must be --config.FIELD=VALUE, or a launcher's flag")
        if match[1] in fields:
            raise ValueError(f"{override}: must not be given, {match[1]} {reason}")


# ------------------------------------------------------------------------------------------- Checks


def read_config(unit: WorkUnit) -> Config:
    """Build the config that `spell_jax.train` will get; errors as in entry.load_config."""
    return entry.load_config(unit.flags)


def check_config(config: Config, executor: str) -> None:
    """Check everything that can be checked without devices; buckets (vertex) are not read.

    Raises ValueError (field, value and remedy), or FileNotFoundError for a missing folder or file.
    """
    run, mistakes = collect_mistakes(config)
    if run is not None and executor == "vertex" and _check_buckets(config):
        mistakes = {field: text for field, text in mistakes.items() if field not in _DATA_PATHS}
    if run is None or mistakes:
        raise ConfigError(mistakes.values())
    run.algorithm.load_prompts()
    if executor == "local":
        find_folder(run.policy.folder)


def _check_buckets(config: Config) -> bool:
    """Check that data and models are below MOUNT or generated; return whether any is in a bucket.

    Raises ValueError for a path of this machine.
    """
    paths = {field: config.data[field.removeprefix("data.")] for field in _DATA_PATHS}
    if is_tfds(config.data.source):
        del paths["data.source"]
        paths["data.tfds_data_dir"] = config.data.tfds_data_dir or "~/tensorflow_datasets"
    elif is_generated(config.data.source):
        del paths["data.source"]
    paths |= {f"{name}.folder": config[name].folder for name in model_sections(config)}
    for field, path in paths.items():
        if path not in ("", "tiny") and not path.startswith(MOUNT):
            raise ValueError(f"{field} = {path!r}: must be below {MOUNT}, for executor = 'vertex'")
    missing = [field for field, path in paths.items() if field.endswith("folder") and not path]
    if not config.data.source and not config.data.questions:
        missing.append("data.source")
    if missing:
        raise ValueError(f"{missing[0]} = '': must be 'tiny' or below {MOUNT}")
    return any(path.startswith(MOUNT) for path in paths.values())


def requirements(executor: str, accelerator: str, cpu: int, ram_gib: int) -> dict[str, int]:
    """Return a unit's machine requirements: XManager's resource -> amount, RAM in bytes.

    "" and 0 mean none. Raises ValueError if the accelerator is unknown, or a local run has any.
    """
    machine_flags = {"accelerator": accelerator, "cpu": cpu, "ram_gib": ram_gib}
    if executor == "local":
        for field, value in machine_flags.items():
            if value:
                raise ValueError(f"{field} = {value!r}: must not be given for executor = 'local'")
    resources = {name: value for name, value in (("cpu", cpu), ("ram", ram_gib * 2**30)) if value}
    if accelerator:
        name, _, count = accelerator.partition("=")
        if name not in EXTRAS or not re.fullmatch("[1-9][0-9]*", count):
            raise ValueError(
                f"accelerator = {accelerator!r}: must be NAME=COUNT with one of {sorted(EXTRAS)}"
            )
        resources[name] = int(count)
    return resources


# ------------------------------------------------------------------------------------------- Launch


@contextlib.contextmanager
def copied_checkout() -> Iterator[pathlib.Path]:
    """Yield a temporary copy of the files tracked by git, with their current contents."""
    # Tracked files alone: runs and virtual environments do not belong in an image.
    command = ["git", "-C", str(CHECKOUT), "ls-files", "-z"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "spell_jax_checkout"
        for name in filter(None, names):
            if (CHECKOUT / name).is_file():  # False if it was deleted but is still in git's index
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(CHECKOUT / name, copy / name)
        yield copy


def packageable(
    xm: Any, xm_local: Any, checkout: pathlib.Path | None, base_image: str, extra: str
) -> Any:
    """Make an XManager packageable that runs the trainer.

    The files of `checkout` go into an image on `base_image` with the pip `extra` of setup.py ("":
    none). Without a checkout, the trainer runs here with this Python.
    """
    if checkout is None:
        # A binary, not a container: a local run uses this Python's packages and devices.
        binary, local = xm.Binary(path=sys.executable), xm_local.Local.Spec()
        arguments = ["-m", "spell_jax.train"]
        return xm.Packageable(executable_spec=binary, executor_spec=local, args=arguments)
    package = f".[{extra}]" if extra else "."
    spec = xm.PythonContainer(
        path=str(checkout),
        base_image=base_image,
        # XManager puts the entry point into the last WORKDIR, so that it starts next to configs/.
        docker_instructions=[
            f"COPY {checkout.name}/ /{checkout.name}",
            f"WORKDIR /{checkout.name}",
            f"RUN python -m pip install -e '{package}'",
        ],
        entrypoint=xm.CommandList(['python -m spell_jax.train "$@"']),
    )
    return xm.Packageable(executable_spec=spec, executor_spec=xm_local.Vertex.Spec())


async def run_units(
    title: str, executor: str, units: Sequence[WorkUnit], resources: dict[str, int], base_image: str
) -> list[tuple[str, str]]:
    """Package the trainer and run the units in order; return (name, error) of failed ones.

    A unit of "local" ends before the next starts; "vertex" gives no errors.
    """
    # Imported by name because the extra may be missing where types are checked.
    xm: Any = importlib.import_module("xmanager.xm")
    xm_local: Any = importlib.import_module("xmanager.xm_local")
    machine = {"local": xm_local.Local, "vertex": xm_local.Vertex}[executor]
    extra = next((EXTRAS[name] for name in resources if name in EXTRAS), "")
    failed: list[tuple[str, str]] = []
    try:
        async with xm_local.create_experiment(experiment_title=title) as experiment:
            is_local = executor == "local"
            with contextlib.nullcontext() if is_local else copied_checkout() as checkout:
                trainer_package = packageable(xm, xm_local, checkout, base_image, extra)
                [executable] = experiment.package([trainer_package])
            for unit in units:
                print(f"{unit.name}: python -m spell_jax.train {' '.join(unit.flags)}", flush=True)
                on = machine(xm.JobRequirements(**resources))
                job = xm.Job(executable=executable, executor=on, args=list(unit.flags))
                work_unit = await experiment.add(job)
                if is_local:
                    try:
                        await work_unit.wait_until_complete()
                    except Exception as error:  # XManager passes on what the executor raised
                        failed.append((unit.name, str(error)))
    except Exception:
        if not failed:  # leaving the experiment raises a unit's error again
            raise
    return failed


def plan_units(flag_values: Any, overrides: Sequence[str]) -> tuple[list[WorkUnit], dict[str, int]]:
    """Make and check the work units and their machine requirements from the launcher's flags."""
    if flag_values.executor == "vertex" and not flag_values.workdir.startswith(MOUNT):
        raise ValueError(
            f"workdir = {flag_values.workdir!r}: must be below {MOUNT}, for executor = 'vertex'"
        )
    if flag_values.experiment:
        for name in ("config", "sweep"):
            if value := getattr(flag_values, name):
                raise ValueError(f"{name} = {value!r}: must not be given with an experiment")
        units = experiment_units(
            flag_values.experiment, flag_values.workdir, flag_values.inputs, overrides
        )
    elif not flag_values.config:
        raise ValueError("config = None: must be a config file, or give an experiment")
    else:
        units = work_units(
            flag_values.config, flag_values.workdir, parse_sweep(flag_values.sweep), overrides
        )
    # All before the first: a mistake in the last unit must not show after hours of the others.
    for unit in units:
        check_config(read_config(unit), flag_values.executor)
    return units, requirements(
        flag_values.executor, flag_values.accelerator, flag_values.cpu, flag_values.ram_gib
    )


def main(argv: Sequence[str]) -> None:
    flag_values = flags.FLAGS
    units, resources = plan_units(flag_values, argv[1:])
    entry.setup_done()
    swept = f"{pathlib.Path(flag_values.config or '').stem} {' '.join(flag_values.sweep)}".strip()
    title = flag_values.experiment or swept
    failed = asyncio.run(
        run_units(title, flag_values.executor, units, resources, flag_values.base_image)
    )
    for name, error in failed:
        print(f"{name} failed: {error}", file=sys.stderr)
    print(
        f"{len(units) - len(failed)} of {len(units)} work units are "
        f"{EXECUTORS[flag_values.executor]}"
    )
    sys.exit(bool(failed))


def parse_flags(argv: Sequence[str]) -> list[str]:
    """Parse the launcher's and XManager's flags; --config.* flags are left for the units."""
    # absl would refuse --config.FIELD, because this program defines --config as a plain string.
    of_config = [flag for flag in argv if flag.startswith("--config.")]
    launcher_flags = [flag for flag in argv if not flag.startswith("--config.")]
    return flags.FLAGS(launcher_flags) + of_config


if __name__ == "__main__":
    with entry.user_errors():
        try:
            importlib.import_module("xmanager.xm_local")  # defines its flags
        except ImportError as error:
            hint = "pip install -e '.[xmanager]'"
            raise ImportError(f"XManager is not installed ({error}): {hint}") from error
    flags.DEFINE_enum("executor", None, list(EXECUTORS), "Place to run the units.", required=True)
    flags.DEFINE_string("config", None, "Config file of the runs.")
    flags.DEFINE_string("experiment", "", "Table or figure of the papers, instead of --config.")
    flags.DEFINE_string("inputs", ".", "Folder of the experiment's models and data.")
    flags.DEFINE_string("workdir", None, "Folder of the experiment.", required=True)
    flags.DEFINE_multi_string("sweep", [], "FIELD=VALUE,VALUE...; can be repeated.")
    flags.DEFINE_string("accelerator", "", "NAME=COUNT, such as a100=8 or tpu_v3=8.")
    flags.DEFINE_integer("cpu", 0, "Minimum number of cores of a machine.", lower_bound=0)
    flags.DEFINE_integer("ram_gib", 0, "Minimum memory of a machine in GiB.", lower_bound=0)
    flags.DEFINE_string("base_image", "python:3.11", "Image to build on.")
    entry.run_main(main, parse_flags)
