"""Virtual environments of the peers that `python -m benchmarks peers` plays beside."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO

ROOT = pathlib.Path(__file__).resolve().parents[1]
PEERS = ("easydel", "trl", "tunix")
# Newest first. EasyDeL refuses 3.14, and spell_jax needs 3.11.
_PYTHONS = ("3.13", "3.12", "3.11")
# A side has random weights and prompts, so a request to the hub could only cost time.
SIDE_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "USE_HUB_KERNELS": "0",  # transformers would ask the hub for kernels
}
CPU_VARIABLES = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "",
    "CUDA_VISIBLE_DEVICES": "",
    "USE_JAX": "0",  # TRL's libraries would import it
}


class PeerError(ValueError):
    """A peer that cannot be installed or played; the message names the log."""


@dataclasses.dataclass(frozen=True)
class Environment:
    """An interpreter with a peer.

    Attributes:
      python: path of the interpreter.
      log: file that gets what pip and the sides print.
      home: folder that the peer takes for the user's, with its caches; None: the user's.
      seconds: seconds that it took to make; 0 if it was there.
    """

    python: str
    log: pathlib.Path
    home: pathlib.Path | None = None
    seconds: float = 0.0

    def run_module(self, module: str, argument: str) -> str:
        """Run a module of this repository without accelerators; return the last line it prints.

        Raises:
          PeerError: if its process fails.
        """
        variables = SIDE_VARIABLES | CPU_VARIABLES
        if self.home:
            variables |= {"HOME": str(self.home), "XDG_CACHE_HOME": str(self.home / ".cache")}
        # Another interpreter must not find the packages of this one.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with self.log.open("a") as log:
            command = [self.python, "-m", module, argument]
            text = _run(command, module, log, self.log, cwd=ROOT, env=inherited | variables)
        return text.splitlines()[-1]


def ensure(peer: str, folder: pathlib.Path) -> Environment:
    """Make the environment of a peer, or return the environment in `folder` if its versions fit.

    Args:
      peer: one of PEERS; requirements/peer_NAME.txt has its versions.
      folder: folder of all environments.

    Raises:
      FileNotFoundError: if there is no suitable interpreter.
      PeerError: if the installation fails.
    """
    place = folder / peer
    place.mkdir(parents=True, exist_ok=True)
    requirements = ROOT / "requirements" / f"peer_{peer}.txt"
    python, mark = place / "venv" / "bin" / "python", place / "installed.txt"
    home, log = place / "home", place / "log.txt"
    home.mkdir(exist_ok=True)
    # The requirements file is the key: a changed version makes the environment anew.
    versions = requirements.read_text(encoding="utf-8")
    if mark.exists() and mark.read_text(encoding="utf-8") == versions and python.exists():
        return Environment(str(python), log, home)
    began = time.perf_counter()
    mark.unlink(missing_ok=True)
    interpreter = find_interpreter()
    print(f"{peer}: making an environment in {place} with {interpreter}", file=sys.stderr)
    with log.open("w") as file:
        venv = [interpreter, "-m", "venv", "--clear", str(place / "venv")]
        _run(venv, f"the environment of {peer}", file, log)
        install = [str(python), "-m", "pip", "install", "-r", str(requirements)]
        _run(install, f"the installation of {peer}", file, log)
    mark.write_text(versions, encoding="utf-8")  # last, so that an interrupted one is made again
    return Environment(str(python), log, home, time.perf_counter() - began)


def find_interpreter() -> str:
    """Return the newest interpreter of _PYTHONS on PATH, or this process's if _PYTHONS has it.

    Raises:
      FileNotFoundError: if there is no such interpreter.
    """
    # Debian's Python may lack ensurepip, and then cannot make a virtual environment.
    code = "import sys, ensurepip; print('%d.%d' % sys.version_info[:2])"
    names = [f"python{version}" for version in _PYTHONS]
    for version, name in zip(_PYTHONS, names, strict=True):
        for path in filter(None, (shutil.which(name), sys.executable)):
            process = subprocess.run([path, "-c", code], capture_output=True, text=True)
            if process.returncode == 0 and process.stdout.strip() == version:
                return path
    raise FileNotFoundError(f"no {', '.join(names)} with venv on PATH: install one of them")


def _run(
    command: Sequence[str],
    what: str,
    log: IO[str],
    path: pathlib.Path,
    cwd: pathlib.Path | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    """Run a command; return its standard output. Both outputs go to the log."""
    log.write(f"$ {' '.join(command)}\n")
    process = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env)
    log.write(process.stdout + process.stderr)
    if process.returncode:
        # The last line of a Python traceback is the error itself.
        last = (process.stderr.strip() or process.stdout.strip() or "no output").splitlines()[-1]
        raise PeerError(
            f"{what} ended with status {process.returncode}: {last}; {path} has the rest"
        )
    return process.stdout
