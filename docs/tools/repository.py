"""Public address of the repository, for links of the documentation's site.

No address stands in the source: a clone knows it as its remote `origin`, and the variable
REPOSITORY_URL of the environment overrides it. A remote that is a folder has no public address.
"""

from __future__ import annotations

import json
import os
import re
import subprocess

from docs.tools.measurements import ROOT

BRANCH = "main"
# https://user:token@host/owner/name.git, ssh://git@host:22/owner/name, git@host:owner/name.git
_REMOTE = re.compile(
    r"(?=(?:https?|git|ssh)://|[\w.-]+@)(?:(?P<scheme>\w+)://)?(?:[^@/\s]*@)?"
    r"(?P<host>(?:[\w-]+\.)+[a-z]{2,})(?P<port>:[0-9]+(?=/))?"
    r"[/:](?P<path>[\w.~-]+(?:/[\w.~-]+?)+?)(?:\.git)?/?"
)


def find_address() -> str:
    """Return the address https://HOST/OWNER/NAME of REPOSITORY_URL or of the remote origin, or "".

    Raises ValueError if REPOSITORY_URL is set, but is no address of a repository.
    """
    variable = os.environ.get("REPOSITORY_URL", "")
    if variable:
        address = to_address(variable)
        if not address:
            raise ValueError(f"REPOSITORY_URL = {variable!r}: must be https://HOST/OWNER/NAME")
        return address
    if not (ROOT / ".git").exists():  # an unpacked archive, perhaps within another repository
        return ""
    command = ["git", "remote", "get-url", "origin"]
    try:
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:  # no git
        return ""
    return to_address(process.stdout.strip())


def to_address(remote: str) -> str:
    """Return the address of a remote without user and password, or "" of any other text."""
    match = _REMOTE.fullmatch(remote)
    if not match:
        return ""
    port = match["port"] if match["scheme"] in ("http", "https") else None
    return f"https://{match['host']}{port or ''}/{match['path']}"


def fill_source(notebook: str, address: str) -> str:
    """Write an address into the line `SOURCE = ""` of a notebook (JSON).

    Raises ValueError if the notebook does not have the line once.
    """
    content = json.loads(notebook)
    lines = [
        (cell["source"], index)
        for cell in content["cells"]
        for index, line in enumerate(cell["source"])
        if line == 'SOURCE = ""\n'
    ]
    if len(lines) != 1:
        raise ValueError(f"'SOURCE = \"\"' is {len(lines)} times in the notebook, must be once")
    source, index = lines[0]
    source[index] = f"SOURCE = {json.dumps(address)}\n"
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
