"""Control of a page in headless Chromium by the DevTools protocol over a pipe."""

from __future__ import annotations

import json
import pathlib
import shutil
import socket
import subprocess
import time
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome")
PROGRAM = next((path for name in _NAMES if (path := shutil.which(name))), None)
MISSING = "Chromium is missing: apt-get install -y chromium"
_LIMIT_S = 120
# Event -> field of its parameters that describes a problem.
_PROBLEMS = {
    "Runtime.exceptionThrown": "exceptionDetails",
    "Runtime.consoleAPICalled": "args",
    "Log.entryAdded": "entry",
}
_OPTIONS = (
    "--headless --remote-debugging-pipe --no-sandbox --disable-gpu --disable-dev-shm-usage "
    "--window-size=1280,1000 --no-first-run --disable-extensions --disable-background-networking "
    "--disable-component-update"
)


class Browser:
    """A browser with one page.

    Attributes:
      problems: console messages of the page other than plain logs, and uncaught errors.

    Raises:
      FileNotFoundError: if Chromium is not installed.
    """

    def __init__(self, profile: pathlib.Path):
        if PROGRAM is None:
            raise FileNotFoundError(MISSING)
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_LIMIT_S)
        command = [PROGRAM, *_OPTIONS.split(), f"--user-data-dir={profile}", "about:blank"]
        # Chromium reads commands from file descriptor 3 and writes answers to 4.
        shell = f'exec "$@" 3<&{theirs.fileno()} 4>&{theirs.fileno()}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command],
            pass_fds=(theirs.fileno(),),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        self._number, self._rest, self._session = 0, b"", None
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._session = None
        self.call("Browser.close")
        self._process.wait(_LIMIT_S)
        self._socket.close()

    def open(self, path: pathlib.Path, fragment: str = "") -> None:
        """Open a page, clear `problems` and wait until the page sets data-ready on its body."""
        self.call("Page.navigate", url="about:blank")
        self.problems.clear()
        self.call("Page.navigate", url=path.as_uri() + fragment)
        self.wait("document.body?.dataset.ready === 'true'")

    def wait(self, condition: str) -> None:
        """Wait until a JavaScript expression is true.

        Raises:
          TimeoutError: if it is not true within 120 s.
        """
        end = time.monotonic() + _LIMIT_S
        while not self.value(f"!!({condition})"):  # !! because a DOM element by value is {}
            if time.monotonic() > end:
                raise TimeoutError(f"not true: {condition}; problems: {self.problems}")
            time.sleep(0.02)

    def value(self, expression: str) -> Any:
        """Evaluate a JavaScript expression in the page, awaiting a promise.

        Raises:
          RuntimeError: if the expression throws.
        """
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a DevTools command and return its result; record problems reported meanwhile.

        Raises:
          RuntimeError: if the command fails.
          ConnectionError: if Chromium has ended.
          TimeoutError: if Chromium does not answer within 120 s.
        """
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._socket.sendall(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            parameters = answer.get("params", {})
            field = _PROBLEMS.get(answer.get("method", ""), "")
            if field and parameters.get("type") != "log":
                self.problems.append(json.dumps(parameters[field]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = self._socket.recv(1 << 16)
            if not part:
                raise ConnectionError("Chromium has ended")
            self._rest += part
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)
