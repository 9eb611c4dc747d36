"""A `gcloud` without a cloud, for tests: slices are folders, workers are local processes.

1. Every call is appended to $FAKE_GCLOUD/calls.jsonl. Flags that are not in the manual are
   rejected.
2. A queued request becomes ACTIVE after $FAKE_WAITS descriptions, and each slice has $FAKE_WORKERS
   workers.
3. A worker is a home folder, $FAKE_GCLOUD/NAME-N/worker-I for the N-th slice of that name. ssh runs
   its command there, scp copies there. Its python3 only records what it should install, and makes
   "virtual environments" that are links to the tests' Python.
4. The first $FAKE_LOSSES slices are lost at the $FAKE_LOST_AT-th description of their node, in the
   way of $FAKE_LOSS: a state of the node, one of the request (from its next description on), a
   worker's number, which is then unreachable, or REBOOT. All processes of the slice are killed.
5. The verb named in $FAKE_FAIL fails.
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

ROOT = pathlib.Path(os.environ["FAKE_GCLOUD"])
WORKERS = int(os.environ.get("FAKE_WORKERS", "2"))
WAITS = int(os.environ.get("FAKE_WAITS", "0"))
LOSSES = int(os.environ.get("FAKE_LOSSES", "0"))
LOST_AT = int(os.environ.get("FAKE_LOST_AT", "1"))
LOSS = os.environ.get("FAKE_LOSS", "PREEMPTED")
REQUEST_STATES = ("FAILED", "SUSPENDED")

_EVERYWHERE = {"--zone", "--project", "--quiet"}
# The flags in the manuals of `gcloud compute tpus`, as far as they are used.
FLAGS = {
    ("queued-resources", "create"): {
        *("--node-id", "--accelerator-type", "--runtime-version", "--spot", "--reserved"),
        "--valid-until-duration",
    },
    ("queued-resources", "describe"): {"--format"},
    ("queued-resources", "delete"): {"--force", "--async"},
    ("tpu-vm", "describe"): {"--format"},
    ("tpu-vm", "ssh"): {"--worker", "--command"},
    ("tpu-vm", "scp"): {"--worker"},
}
PYTHON3 = """#!/bin/bash
echo "$(hostname) $*" >>"$FAKE_GCLOUD/python3.txt"
if [ "$2 $3" = "uv venv" ]; then
  mkdir -p "${@: -1}/bin" && ln -s PYTHON "${@: -1}/bin/python"
fi
"""


def main(arguments: list[str]) -> int:
    ROOT.mkdir(parents=True, exist_ok=True)
    with (ROOT / "calls.jsonl").open("a") as file:
        file.write(json.dumps(arguments) + "\n")
    kind, verb = arguments[2:4]
    pairs = [word.partition("=") for word in arguments[4:] if word.startswith("--")]
    flags = {name: value for name, _, value in pairs}
    words = [word for word in arguments[4:] if not word.startswith("--")]
    if arguments[:2] != ["compute", "tpus"] or set(flags) - _EVERYWHERE - FLAGS[kind, verb]:
        print(f"ERROR: (gcloud) unrecognized arguments: {arguments}", file=sys.stderr)
        return 2
    if os.environ.get("FAKE_FAIL") == verb:
        print("half of the work is done")
        print(f"ERROR: ({verb}) PERMISSION_DENIED: of course\nsecond line", file=sys.stderr)
        return 7
    path = ROOT / "state.json"
    state = json.loads(path.read_text()) if path.exists() else {"made": {}, "slices": {}}
    status = ACTIONS[kind, verb](state, words, flags)
    if verb not in ("ssh", "scp"):
        path.write_text(json.dumps(state))
    return status


def create(state: dict, words: list[str], flags: dict[str, str]) -> int:
    name = words[0]
    if name in state["slices"]:
        print(f"ERROR: (create) ALREADY_EXISTS: {name}", file=sys.stderr)
        return 1
    number = state["made"].get(name, 0) + 1
    state["made"][name] = number
    state["slices"][name] = {"number": number, "waited": 0, "seen": 0, "lost": False}
    for worker in range(WORKERS):
        tools = home(state, name, worker) / "bin"
        tools.mkdir(parents=True)
        (tools / "python3").write_text(PYTHON3.replace("PYTHON", sys.executable))
        (tools / "hostname").write_text(f"#!/bin/sh\necho t1v-n-fake-w-{worker}\n")
        for tool in tools.iterdir():
            tool.chmod(0o755)
    return 0


def describe_request(state: dict, words: list[str], flags: dict[str, str]) -> int:
    slice_record = find(state, words[0])
    if not slice_record:
        return 1
    slice_record["waited"] += 1
    word = "ACTIVE" if slice_record["waited"] > WAITS else "WAITING_FOR_RESOURCES"
    if slice_record["lost"] and LOSS in REQUEST_STATES:
        word = LOSS
        kill(state, words[0])
    print(json.dumps({"name": words[0], "state": {"state": word}}))
    return 0


def describe_node(state: dict, words: list[str], flags: dict[str, str]) -> int:
    slice_record = find(state, words[0])
    if not slice_record:
        return 1
    slice_record["seen"] += 1
    if slice_record["number"] <= LOSSES and slice_record["seen"] >= LOST_AT:
        slice_record["lost"] = True
        if LOSS not in REQUEST_STATES:
            kill(state, words[0])
    word = "PREEMPTED" if slice_record["lost"] and LOSS == "PREEMPTED" else "READY"
    addresses = [{"ipAddress": f"10.0.0.{worker}"} for worker in range(WORKERS)]
    print(json.dumps({"state": word, "networkEndpoints": addresses}))
    return 0


def delete(state: dict, words: list[str], flags: dict[str, str]) -> int:
    if not find(state, words[0]):
        return 1
    kill(state, words[0])
    del state["slices"][words[0]]
    return 0


def ssh(state: dict, words: list[str], flags: dict[str, str]) -> int:
    worst = 0
    for worker in chosen_workers(flags):
        if unreached(state, words[0], worker):
            worst = worst or 255
            continue
        where = home(state, words[0], worker)
        environment = os.environ | {"HOME": str(where), "PATH": f"{where}/bin:{os.environ['PATH']}"}
        command = ["bash", "-c", flags["--command"]]
        process = subprocess.run(command, cwd=where, env=environment, check=False)
        worst = worst or process.returncode
    return worst


def scp(state: dict, words: list[str], flags: dict[str, str]) -> int:
    name, _, target = words[-1].partition(":")
    for worker in chosen_workers(flags):
        if unreached(state, name, worker):
            return 255
        shutil.copy(words[0], home(state, name, worker) / target)
    return 0


ACTIONS = {
    ("queued-resources", "create"): create,
    ("queued-resources", "describe"): describe_request,
    ("queued-resources", "delete"): delete,
    ("tpu-vm", "describe"): describe_node,
    ("tpu-vm", "ssh"): ssh,
    ("tpu-vm", "scp"): scp,
}


def find(state: dict, name: str) -> dict | None:
    if name not in state["slices"]:
        print(f"ERROR: (gcloud) NOT_FOUND: Resource '{name}' was not found", file=sys.stderr)
    return state["slices"].get(name)


def home(state: dict, name: str, worker: int) -> pathlib.Path:
    return ROOT / f"{name}-{state['made'][name]}" / f"worker-{worker}"


def chosen_workers(flags: dict[str, str]) -> range:
    if flags["--worker"] == "all":
        return range(WORKERS)
    return range(int(flags["--worker"]), int(flags["--worker"]) + 1)


def unreached(state: dict, name: str, worker: int) -> bool:
    slice_record = state["slices"].get(name)
    if slice_record and not (slice_record["lost"] and LOSS in ("PREEMPTED", str(worker))):
        return False
    print(f"ssh: connect to worker {worker}: Connection timed out", file=sys.stderr)
    return True


def kill(state: dict, name: str) -> None:
    """End the processes on a slice's workers, which are those whose home is there."""
    mark = f"HOME={ROOT / (name + '-' + str(state['made'][name]))}/worker-".encode()
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
