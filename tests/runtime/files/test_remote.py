"""Tests of the cache of fetched files: what is read, when again, and what fails how.

The remote is fsspec's file system in memory; tests replace its methods by failing ones.
"""

from __future__ import annotations

import collections
import concurrent.futures
import json
import pathlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import fsspec
import pytest
from aiohttp import ClientResponseError, ServerDisconnectedError
from fsspec.implementations.memory import MemoryFileSystem
from gcsfs.retry import HttpError

from spell_jax.data import built
from spell_jax.data.config import DataConfig, open_clusters
from spell_jax.data.questions import read_questions
from spell_jax.policy import tokenizer
from spell_jax.policy.model import TINY_POLICY, find_folder
from spell_jax.question_sets import tuning_rows
from spell_jax.runtime import entry
from spell_jax.runtime.files import paths, remote
from spell_jax.selfplay import prompts

URL = "memory://bucket/folder"
FILES = {"a.txt": b"one", "deep/b.txt": b"two, longer", "empty": b""}

cat_file, info, find = MemoryFileSystem.cat_file, MemoryFileSystem.info, MemoryFileSystem.find


class Bucket:
    """The remote, and how often each of its files was read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.reads: collections.Counter[str] = collections.Counter()
        self._monkeypatch = monkeypatch
        self.replace("cat_file", cat_file)

    def replace(self, name: str, method: Any) -> None:
        """Replace a method of the file system; reads by `cat_file` are counted."""

        def counted(system, path, *arguments, **options):
            if name == "cat_file":
                self.reads[path.removeprefix("/bucket/folder/")] += 1
            return method(system, path, *arguments, **options)

        self._monkeypatch.setattr(MemoryFileSystem, name, counted)

    def change_listing(self, **fields: Any) -> None:
        def changed(*arguments, **options):
            listing: Any = find(*arguments, **options)
            return {path: entry | fields for path, entry in listing.items()}

        self.replace("find", changed)

    def write(self, name: str, content: bytes) -> None:
        fsspec.filesystem("memory").pipe(f"/bucket/folder/{name}", content)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[Bucket]:
    monkeypatch.setenv(paths.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "BACKOFF_S", 0.0)
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    fake_bucket = Bucket(monkeypatch)
    for name, content in FILES.items():
        fake_bucket.write(name, content)
    remote.cached_copy.cache_clear()
    yield fake_bucket
    remote.cached_copy.cache_clear()


def fetch_again(url: str = URL) -> pathlib.Path:
    """Fetch as a new process would: with an empty cache."""
    remote.cached_copy.cache_clear()
    return remote.fetch(url)


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_local_path_is_itself(bucket, tmp_path):
    for path in ("some/folder", tmp_path / "no such"):
        assert remote.fetch(path) == pathlib.Path(path)
    assert not paths.cache_folder().exists()


def test_file_and_folder_are_fetched_once(bucket):
    folder = remote.fetch(f"{URL}/")
    assert folder.name == "folder" and paths.cache_folder() in folder.parents
    assert contents(folder) == FILES
    assert bucket.reads == {"a.txt": 1, "deep/b.txt": 1}  # nothing is read of an empty file
    assert fetch_again() == folder
    file = remote.fetch(f"{URL}/deep/b.txt")
    assert file.name == "b.txt" and file.read_bytes() == FILES["deep/b.txt"]
    assert bucket.reads == {"a.txt": 1, "deep/b.txt": 2}


def test_a_process_looks_at_a_url_once_with_and_once_without_weights(bucket):
    bucket.write("model.safetensors", b"weights")
    fetches = {
        True: [{}, {"with_weights": True}],
        False: [{"with_weights": False}, {"with_weights": False}],
    }
    for with_weights, keywords in fetches.items():
        first = remote.fetch(URL, **keywords[0])
        assert (first / "model.safetensors").exists() == with_weights
        bucket.write("a.txt", f"new {with_weights}".encode())
        for url in (URL, f"{URL}/"):
            assert remote.fetch(url, **keywords[1]) == first
    assert remote.cached_copy.cache_info().misses == 2


def test_only_changed_files_are_read_again(bucket):
    first = remote.fetch(URL)
    bucket.write("a.txt", b"new")
    bucket.write("added", b"x")
    assert remote.fetch(URL) == first  # a process keeps to one version
    second = fetch_again()
    assert contents(second) == FILES | {"a.txt": b"new", "added": b"x"}
    assert contents(first) == FILES  # another process may still read it
    assert bucket.reads == {"a.txt": 2, "deep/b.txt": 1, "added": 1}


def test_file_without_a_version_is_read_by_every_process(bucket):
    bucket.change_listing(created=None)
    for _ in range(2):
        assert contents(fetch_again()) == FILES
    assert bucket.reads == {"a.txt": 2, "deep/b.txt": 2}


def test_large_files_are_read_in_parts_and_those_of_unknown_size_whole(bucket, monkeypatch):
    monkeypatch.setattr(remote, "CHUNK", 4)
    assert contents(fetch_again()) == FILES
    assert bucket.reads == {"a.txt": 1, "deep/b.txt": 3}
    bucket.change_listing(size=None)
    assert contents(fetch_again()) == FILES
    assert bucket.reads == {"a.txt": 2, "deep/b.txt": 4, "empty": 1}


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def status_error(status: int) -> ClientResponseError:
    request = SimpleNamespace(real_url="http://b/o")
    return ClientResponseError(cast(Any, request), (), status=status)


TRANSIENT = [
    ConnectionResetError("reset"),
    TimeoutError(),
    ServerDisconnectedError(),
    HttpError({"code": 503, "message": "busy"}),
    HttpError({"code": "429", "message": "too many"}),
    status_error(502),
    caused(FileNotFoundError("url"), status_error(500)),  # as the HTTP file system says it
    caused(FileNotFoundError("url"), TimeoutError()),
]
PERMANENT = [
    (FileNotFoundError("x"), "there is no such file or folder; check the name"),
    (caused(FileNotFoundError("x"), RuntimeError("s3fs")), "there is no such file or folder"),
    (PermissionError("no"), r"the access is refused \(PermissionError: no\); .* log in"),
    (OSError("Forbidden: b/o\nno"), r"the access is refused \(OSError: Forbidden: b/o no\)"),
    (HttpError({"code": 401, "message": "Anonymous"}), "the access is refused"),
    (caused(FileNotFoundError("url"), status_error(403)), "the access is refused"),
    (ValueError("Bad Request"), r"cannot be read at all \(ValueError: Bad Request\)"),
]


@pytest.mark.parametrize("method", ["cat_file", "info"])
@pytest.mark.parametrize("error", TRANSIENT, ids=repr)
def test_transient_errors_are_tried_again(bucket, caplog, error, method):
    real, failures = {"cat_file": cat_file, "info": info}[method], [error] * (remote.ATTEMPTS - 1)

    def fails(system, path, *arguments, **options):
        if path.endswith("a.txt") and failures:
            raise failures.pop()
        return real(system, path, *arguments, **options)

    bucket.replace(method, fails)
    assert remote.fetch(f"{URL}/a.txt").read_bytes() == b"one"
    tries = [record for record in caplog.records if "try" in record.message]
    assert len(tries) == remote.ATTEMPTS - 1 and URL in tries[0].message
    failures += [error] * remote.ATTEMPTS
    bucket.write("a.txt", b"new")
    with pytest.raises(remote.FetchError, match=r"^memory://.*a.txt: cannot be read in 5 tries"):
        fetch_again(f"{URL}/a.txt")


@pytest.mark.parametrize(("error", "message"), PERMANENT, ids=repr)
def test_permanent_errors_are_not_tried_again(bucket, error, message):
    def fails(system, path, **options):
        raise error

    bucket.replace("cat_file", fails)
    with pytest.raises(remote.FetchError, match=f"^{URL}/a.txt: {message}") as raised:
        remote.fetch(f"{URL}/a.txt")
    assert bucket.reads.total() == 1
    assert "\n" not in str(raised.value)


def test_request_without_an_answer_fails(bucket, monkeypatch):
    monkeypatch.setattr(remote, "TIMEOUT_S", 0.02)
    monkeypatch.setattr(remote, "ATTEMPTS", 2)
    never = threading.Event()
    bucket.replace("cat_file", lambda *arguments, **options: never.wait())
    with pytest.raises(remote.FetchError, match=r"in 2 tries \(TimeoutError: no answer within"):
        remote.fetch(f"{URL}/a.txt")
    never.set()
    assert bucket.reads.total() == 2


def test_answer_that_is_cut_off_is_asked_for_again(bucket):
    lengths = [2, 0, 3]
    bucket.replace("cat_file", lambda *arguments, **options: cat_file(*arguments)[: lengths.pop(0)])
    assert remote.fetch(f"{URL}/a.txt").read_bytes() == b"one"
    lengths += [2] * remote.ATTEMPTS
    bucket.write("a.txt", b"new")
    with pytest.raises(remote.FetchError, match="2 bytes instead of 3, from 0"):
        fetch_again(f"{URL}/a.txt")


def test_folder_that_changes_while_it_is_read_is_fetched_as_it_is_then(bucket):
    written = [b"two", b"also longer than before"]

    def changes(system, path, **options):
        if path.endswith("a.txt") and written:
            bucket.write("deep/b.txt", written.pop(0))
        return cat_file(system, path, **options)

    bucket.replace("cat_file", changes)
    folder = remote.fetch(URL)
    assert contents(folder) == FILES | {"deep/b.txt": b"two"}
    assert bucket.reads["a.txt"] == 1
    bucket.write("a.txt", b"new")
    assert contents(fetch_again()) == contents(folder) | {
        "a.txt": b"new",
        "deep/b.txt": b"also longer than before",
    }


def test_file_that_is_replaced_while_it_is_read_is_not_kept_for_its_old_version(bucket):
    def find_hashed(system, path, **options):
        listing: Any = find(system, path, **options)
        return {
            name: entry | {"md5Hash": cat_file(system, name).hex()}
            for name, entry in listing.items()
        }

    def changes(system, path, **options):
        if path.endswith("a.txt") and bucket.reads["a.txt"] == 1:
            bucket.write("a.txt", b"new")
        return cat_file(system, path, **options)

    bucket.replace("find", find_hashed)
    bucket.replace("cat_file", changes)
    assert contents(remote.fetch(URL)) == FILES | {"a.txt": b"new"}
    bucket.write("a.txt", FILES["a.txt"])
    assert contents(fetch_again()) == FILES


def test_folder_that_always_changes_is_refused(bucket):
    def changes(system, path, **options):
        content = cat_file(system, path, **options)
        bucket.write("a.txt", str(bucket.reads.total()).encode())
        return content

    bucket.replace("cat_file", changes)
    with pytest.raises(remote.FetchError, match="changed each time that it was read"):
        remote.fetch(URL)


def test_fetch_that_is_killed_leaves_nothing_and_is_continued(bucket, monkeypatch):
    monkeypatch.setattr(remote, "WORKERS", 1)
    monkeypatch.setattr(remote, "CHUNK", 4)

    def dies(system, path, start=None, end=None):
        if start:
            raise KeyboardInterrupt
        return cat_file(system, path, start=start, end=end)

    bucket.replace("cat_file", dies)
    with pytest.raises(KeyboardInterrupt):
        remote.fetch(URL)
    (half,) = paths.cache_folder().rglob("unfinished/*")
    assert half.read_bytes() == b"two,"
    bucket.replace("cat_file", cat_file)
    bucket.reads.clear()
    assert contents(fetch_again()) == FILES
    assert bucket.reads == {"deep/b.txt": 3}
    assert list(paths.cache_folder().rglob("unfinished/*")) == []


def test_processes_that_fetch_together_read_once(bucket):
    start = threading.Barrier(4)

    def fetch(_) -> pathlib.Path:
        start.wait()
        return remote.cached_copy.__wrapped__(URL, True)  # a lock of its own, as in another process

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        (folder,) = set(pool.map(fetch, range(4)))
    assert contents(folder) == FILES
    assert bucket.reads == {"a.txt": 1, "deep/b.txt": 1}


def test_names_and_packages_that_do_not_exist_are_named(bucket, monkeypatch):
    with pytest.raises(remote.FetchError, match=r"^memory://bucket/none: there is no such file"):
        remote.fetch("memory://bucket/none")
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", ["/bucket/bare"])
    with pytest.raises(remote.FetchError, match=r"^memory://bucket/bare: has no files"):
        remote.fetch("memory://bucket/bare")
    with pytest.raises(
        ImportError, match=r"^x1://b/c: .*Protocol not known: x1.* install the pack"
    ):
        remote.fetch("x1://b/c")
    fsspec.register_implementation("x2", "no.such.Module", errtxt="Install x2fs", clobber=True)
    with pytest.raises(ImportError, match=r"^x2://b/c: cannot be opened \(Install x2fs\)"):
        remote.fetch("x2://b/c")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"^gs://b/c: .* pip install 'spell_jax\[gcs\]'$"):
        remote.fetch("gs://b/c")


def test_names_that_leave_the_folder_are_refused(bucket):
    MemoryFileSystem.store["/bucket/folder/../../x"] = MemoryFileSystem.store[
        "/bucket/folder/a.txt"
    ]
    with pytest.raises(remote.FetchError, match=r"has a file '../../x'; must have names without"):
        remote.fetch(URL)


def test_cache_that_cannot_be_written_is_named(bucket, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(paths.CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(remote.FetchError, match=f"^{URL}: its copy cannot be written .*_CACHE$"):
        remote.fetch(URL)


def test_command_ends_with_one_line(bucket, capsys):
    with pytest.raises(SystemExit) as ended, entry.user_errors():
        remote.fetch("memory://bucket/none")
    assert ended.value.code == entry.EXIT_CODE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: memory://bucket/none: ")


def test_readers_of_data_and_weights_take_urls(bucket):
    """Commands read data and weights by these functions; test_gcs.py runs two such commands."""
    for path in TINY_POLICY.iterdir():
        bucket.write(f"policy/{path.name}", path.read_bytes())
    question = {"task": "general_qa", "documents": ["A"], "question": "B?", "answer": "C"}
    bucket.write("questions.jsonl", json.dumps(question).encode())
    bucket.write("rows.jsonl", b'{"prompt": "a", "completion": "b"}')
    bucket.write("clusters.jsonl", b'{"id": "a", "documents": ["D"]}')
    bucket.write("texts/a.md", b"A text.")
    bucket.write("templates/verifier.txt", b"{question} {answer} {reference}")

    folder = find_folder(f"{URL}/policy")
    assert contents(folder) == contents(TINY_POLICY) and folder.name == "policy"
    without_weights = contents(find_folder(f"{URL}/policy", with_weights=False))
    assert {*contents(folder)} - {*without_weights} == {"model.safetensors"}
    assert tokenizer.load(f"{URL}/policy").encode("a") == tokenizer.load(TINY_POLICY).encode("a")
    (read,) = read_questions(f"{URL}/questions.jsonl", "data.questions")
    assert read.answer == "C"
    assert tuning_rows.read_rows(f"{URL}/rows.jsonl")[0][0].completion == "b"
    assert prompts.load(f"{URL}/templates").verifier("q", "a", "r") == "q a r"
    for name, text in {"clusters.jsonl": "D", "texts": "A text."}.items():
        data = DataConfig(f"{URL}/{name}", validation=f"{URL}/questions.jsonl")
        data.check()
        source, _ = open_clusters(data, 0, len)
        assert source.read(list(source.tasks))[0].documents == (text,)
    assert not built.is_built(f"{URL}/texts")
