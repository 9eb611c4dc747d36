"""A Hugging Face Hub on this machine: the part of its HTTP API that huggingface_hub uses for us."""

from __future__ import annotations

import base64
import collections
import contextlib
import hashlib
import http.server
import json
import pathlib
import re
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from huggingface_hub import constants, hf_api

from spell_jax.runtime.files import remote

TOKEN = "hf_of_the_tests"
_MODEL = r"/api/models/(?P<name>[^/]+/[^/]+)"
_FILE = r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/"


class FakeHub:
    """Repositories by name, each a list of commits, which are contents by path.

    Attributes:
      commits: commits of each repository by their id, oldest first.
      branches: commit of each branch or tag, by repository.
      gated: repositories whose terms nobody has accepted.
      private: whether a repository was created as a private one.
      refuses_commits: whether pushes are refused.
      reads: number of downloads of each "OWNER/NAME/PATH".
    """

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}
        self.branches: dict[str, dict[str, str]] = {}
        self.gated: set[str] = set()
        self.private: dict[str, bool] = {}
        self.refuses_commits = False
        self.reads: collections.Counter[str] = collections.Counter()

    def commit(self, name: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Replace all files of a repository; return the commit's id."""
        commits = self.commits.setdefault(name, {})
        content = {path: data.hex() for path, data in files.items()}
        sha = hashlib.sha1(json.dumps([len(commits), content]).encode()).hexdigest()
        commits[sha] = dict(files)
        self.branches.setdefault(name, {})[branch] = sha
        return sha

    def commit_folder(self, name: str, folder: pathlib.Path) -> str:
        return self.commit(name, {path.name: path.read_bytes() for path in folder.iterdir()})

    def head(self, name: str) -> dict[str, bytes]:
        """Return the files of a repository's main branch."""
        return self.commits[name][self.branches[name]["main"]]

    def find(self, name: str, revision: str) -> str | None:
        """Return the commit that a revision names, if there is one."""
        branches = self.branches.get(name, {})
        return revision if revision in self.commits.get(name, {}) else branches.get(revision)

    def apply(self, name: str, lines: list[Any]) -> str:
        """Make the commit of a push."""
        files = dict(self.head(name)) if name in self.branches else {}
        for line in lines:
            if line["key"] == "deletedFile":
                del files[line["value"]["path"]]
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return self.commit(name, files)


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: FakeHub

    def do_HEAD(self) -> None:
        self._answer_get()

    def do_GET(self) -> None:
        self._answer_get()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = urllib.parse.unquote(self.path.partition("?")[0])
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401, {"error": "no token"}, "RepoNotFound")
        if path == "/api/repos/create":
            fields = json.loads(body)
            name = f"{fields['organization']}/{fields['name']}"
            if name in self.hub.commits:
                return self._send(409, {"error": "exists", "url": f"{constants.ENDPOINT}/{name}"})
            self.hub.private[name] = fields.get("private", fields.get("visibility") == "private")
            self.hub.commit(name, {".gitattributes": b""})
            return self._send(200, {"url": f"{constants.ENDPOINT}/{name}"})
        if match := re.fullmatch(f"{_MODEL}/preupload/main", path):
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return self._send(200, {"files": files})
        if match := re.fullmatch(f"{_MODEL}/commit/main", path):
            if self.hub.refuses_commits:
                return self._send(403, {"error": "read-only token"})
            sha = self.hub.apply(match["name"], [json.loads(line) for line in body.splitlines()])
            url = f"{constants.ENDPOINT}/{match['name']}/commit/{sha}"
            return self._send(200, {"commitUrl": url, "commitOid": sha, "success": True})
        self._send(404, {"error": path})

    def _answer_get(self) -> None:
        path = urllib.parse.unquote(self.path.partition("?")[0])
        if path == "/api/whoami-v2":
            is_user = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            return self._send(200 if is_user else 401, {"name": "user", "type": "user"})
        api = re.fullmatch(rf"{_MODEL}(?:/(?P<kind>revision|tree)/(?P<revision>.+))?", path)
        file = re.fullmatch(f"{_FILE}(?P<path>.+)", path)
        match = api or file
        if not match or match["name"] not in self.hub.commits:
            return self._send(401, {"error": "no such repository"}, "RepoNotFound")
        sha = self.hub.find(match["name"], match["revision"] or "main")
        if sha is None:
            return self._send(404, {"error": "no such revision"}, "RevisionNotFound")
        files = self.hub.commits[match["name"]][sha]
        if api:
            return self._describe(match, sha, files)
        assert file
        if match["name"] in self.hub.gated:
            return self._send(403, {"error": "gated"}, "GatedRepo")
        if file["path"] not in files:
            return self._send(404, {"error": "no such file"}, "EntryNotFound")
        if self.command == "GET":
            self.hub.reads[f"{match['name']}/{file['path']}"] += 1
        data = files[file["path"]]
        etag = hashlib.sha1(data).hexdigest()
        self._send_bytes(200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": sha})

    def _describe(self, match: re.Match[str], sha: str, files: Mapping[str, bytes]) -> None:
        """Answer with a repository's files, or their names alone."""
        if match["kind"] == "tree":
            entries = [
                {
                    "type": "file",
                    "path": path,
                    "size": len(data),
                    "oid": hashlib.sha1(data).hexdigest(),
                }
                for path, data in files.items()
            ]
            return self._send(200, entries)
        names = [{"rfilename": path} for path in files]
        self._send(200, {"id": match["name"], "sha": sha, "siblings": names})

    def _send(self, status: int, content: Any, code: str = "") -> None:
        headers = {"X-Error-Code": code} if code else {}
        self._send_bytes(status, json.dumps(content).encode(), headers)

    def _send_bytes(self, status: int, data: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        """Write no line for a request."""


@contextlib.contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, cache: pathlib.Path) -> Iterator[FakeHub]:
    """Make huggingface_hub use a new FakeHub and an empty cache folder, without a token."""
    hub = FakeHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        point_to(monkeypatch, f"http://127.0.0.1:{server.server_port}", cache)
        yield hub
    finally:
        remote.cached_copy.cache_clear()
        server.shutdown()
        server.server_close()
        thread.join()


def point_to(monkeypatch: pytest.MonkeyPatch, endpoint: str, cache: pathlib.Path) -> None:
    """Make huggingface_hub use an endpoint and a cache folder."""
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no token"))
    monkeypatch.setattr(hf_api.api, "endpoint", endpoint)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    remote.cached_copy.cache_clear()
