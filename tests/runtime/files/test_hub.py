"""Tests of models of the Hugging Face Hub: what is downloaded, which commit, and what fails how.

huggingface_hub talks to a server in this process (fake_hub.py).
"""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Iterator

import huggingface_hub
import pytest

from spell_jax.policy import lora, tokenizer, weights
from spell_jax.policy.formats import hf_tokenizer, safetensors
from spell_jax.policy.model import TINY_POLICY, find_folder
from spell_jax.runtime import entry
from spell_jax.runtime.files import hub, remote
from spell_jax.runtime.files.durable import SaveError
from tests.runtime.files import fake_hub
from tests.runtime.files.fake_hub import FakeHub

URL = "hf://own/tiny"
FILES = {path.name: path.read_bytes() for path in TINY_POLICY.iterdir()}
# Of a repository's files, these are not read.
OTHERS = {
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"again",
    "model.gguf": b"gguf",
    "README.md": b"about",
    "onnx/config.json": b"{}",
    "original/model.safetensors": b"again",
}
OTHER_COMMIT = "0123456789" * 4


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[FakeHub]:
    with fake_hub.serving(monkeypatch, tmp_path / "cache") as server:
        server.commit("own/tiny", FILES | OTHERS)
        yield server


def fetch_again(url: str = URL) -> pathlib.Path:
    """Fetch as a new process would."""
    remote.cached_copy.cache_clear()
    return remote.fetch(url)


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_only_files_of_a_policy_are_downloaded_and_only_once(fake, caplog):
    with caplog.at_level("INFO", "spell_jax"):
        folder = find_folder(URL)
    commit = fake.branches["own/tiny"]["main"]
    assert contents(folder) == FILES and f"{URL}: commit {commit}, in " in caplog.text
    assert fake.reads == {f"own/tiny/{name}": 1 for name in FILES}
    assert fetch_again() == folder and fake.reads.total() == len(FILES)
    weights.check_headers(folder)
    assert tokenizer.load(URL).encode("a") == tokenizer.load(TINY_POLICY).encode("a")


def test_tokenizer_is_read_without_the_weights(fake):
    assert tokenizer.load(URL).encode("a") == tokenizer.load(TINY_POLICY).encode("a")
    assert fake.reads and "own/tiny/model.safetensors" not in fake.reads
    assert contents(find_folder(URL)) == FILES  # the weights are added to the same folder


def test_path_in_a_repository_may_be_a_file_or_a_folder(fake):
    fake.commit("own/two", {f"small/{name}": data for name, data in FILES.items()} | OTHERS)
    assert contents(remote.fetch("hf://own/two/small")) == FILES
    assert remote.fetch("hf://own/two@main/README.md").read_bytes() == b"about"
    assert set(fake.reads) == {"own/two/README.md", *(f"own/two/small/{name}" for name in FILES)}


def test_branch_moves_and_commit_stays(fake):
    first = fake.commit("own/tiny", FILES | {"config.json": b"old"})
    old = hub.pin(URL)
    assert old == f"{URL}@{first}" and hub.pin(old) == old
    second = fake.commit("own/tiny", FILES)
    fake.commit("own/tiny", FILES | {"config.json": b"dev"}, "dev")
    assert hub.pin(URL) == f"{URL}@{second}"
    assert (fetch_again(old) / "config.json").read_bytes() == b"old"
    assert (fetch_again() / "config.json").read_bytes() == FILES["config.json"]
    assert (fetch_again(f"{URL}@dev") / "config.json").read_bytes() == b"dev"
    fake.commit("own/two", {"small/config.json": b"{}"})
    pinned = f"hf://own/two@{fake.branches['own/two']['main']}/small"
    assert hub.pin("hf://own/two/small") == pinned


def test_repository_of_a_tokenizer_alone_is_pinned(fake):
    files = {"tokenizer.json": b"{}", "small/tokenizer.json": b"{}"}
    commit = fake.commit("own/words", files)
    assert hub.pin("hf://own/words") == f"hf://own/words@{commit}"
    for path in ("small", "small/tokenizer.json"):
        assert hub.pin(f"hf://own/words@main/{path}") == f"hf://own/words@{commit}/{path}"


@pytest.mark.parametrize("url", [URL, f"{URL}@v2", f"{URL}/small", f"{URL}@refs/pr/1/a/b.json"])
def test_slashes_at_the_end_of_a_url_mean_nothing(fake, url):
    assert hub.Repository.parse(f"{url}/") == hub.Repository.parse(f"{url}//")
    assert hub.Repository.parse(f"{url}/") == hub.Repository.parse(url)
    assert hub.pin(f"{URL}/") == hub.pin(URL)


@pytest.mark.parametrize(
    ("url", "saved", "keeps_commit"),
    [
        (URL, f"{URL}@{OTHER_COMMIT}", True),
        (f"{URL}@v2", f"{URL}@{OTHER_COMMIT}", True),
        (f"{URL}@{'a' * 40}", f"{URL}@{OTHER_COMMIT}", False),
        (URL, f"hf://own/other@{OTHER_COMMIT}", False),
        (URL, f"{URL}@{OTHER_COMMIT}/small", False),
        (URL, URL, False),
        (URL, "some/folder", False),
    ],
)
def test_run_keeps_the_commit_with_which_it_began(url, saved, keeps_commit):
    assert hub.keep_commit(url, saved) == (saved if keeps_commit else url)


def test_downloaded_model_is_read_without_a_network(fake, monkeypatch, tmp_path):
    folder = remote.fetch(URL)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    fake_hub.point_to(monkeypatch, "http://127.0.0.1:1", tmp_path / "cache")
    assert fetch_again() == folder
    assert hub.pin(URL) == f"{URL}@{folder.name}"
    with pytest.raises(remote.FetchError) as raised:
        remote.fetch("hf://own/other@v2")
    assert str(raised.value) == (
        "hf://own/other@v2: the Hub cannot be reached, or fails (ConnectError: [Errno 111] "
        "Connection refused); try again, or run `hf download own/other --revision v2 --local-dir "
        "DIR` where that works and name DIR instead of the URL, as in policy.folder=DIR"
    )


def test_without_the_package_the_command_is_named(fake, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"pip install huggingface_hub, or run `hf download own/"):
        remote.fetch(URL)


MISTAKES = {
    "hf://own/none": "there is no such repository, or it is private; check the name, or log in",
    f"{URL}@v9": "has no revision 'v9'; must be a branch, a tag or a whole commit",
    f"{URL}@feature/x": "has no revision 'feature'; .*; of a branch with slashes in its name, give",
    f"{URL}@{OTHER_COMMIT}": f"has no revision '{OTHER_COMMIT}'; must be",
    f"{URL}/none": "there is no such file or folder; check the name",
    "hf://own/gated": r"is gated; accept its terms at https://huggingface.co/own/gated, then log",
    "hf://own/bin": "has no .safetensors files, which hold weights",
    "hf://": r"must be hf://OWNER/NAME\[@REVISION\]\[/PATH\]",
    "hf://gpt2": r"must be hf://OWNER/NAME\[@REVISION\]\[/PATH\]",
    f"{URL}//tmp/x": "must be .* where no part of PATH is empty, '.' or '..'",
    "hf://o--wn/tiny": r"must be hf://OWNER/NAME.* \(HFValidationError",
}


@pytest.mark.parametrize("url", MISTAKES)
def test_mistakes_end_with_one_line(fake, capsys, url):
    fake.commit("own/gated", FILES)
    fake.gated.add("own/gated")
    fake.commit("own/bin", {"config.json": b"{}", "pytorch_model.bin": b""})
    with pytest.raises((remote.FetchError, ValueError), match=f"^{url}: {MISTAKES[url]}"):
        remote.fetch(url)
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended, entry.user_errors():
        remote.fetch(url)
    assert ended.value.code == entry.EXIT_CODE
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {url}: ")


@pytest.mark.parametrize("path", ["/{}", "..", "../..", "sub/../sub", "a//b", "./a", "a/."])
def test_path_stays_in_its_repository(fake, tmp_path, path):
    url = f"{URL}/{path.format(tmp_path)}"
    for read in (remote.fetch, hub.fetch, hub.pin):
        with pytest.raises(
            ValueError, match=rf"^{re.escape(url)}: must be hf://.* '\.' or '\.\.'$"
        ):
            read(url)
    assert hub.keep_commit(URL, f"{URL}@{OTHER_COMMIT}/{path}") == URL
    assert hub.Repository.parse(f"{URL}/.a/..b/c..").path == ".a/..b/c.."


def test_bare_name_gets_a_hint():
    with pytest.raises(FileNotFoundError, match=r"; the Hub's model is 'hf://Qwen/Qwen3-0.6B'$"):
        find_folder("Qwen/Qwen3-0.6B")
    for folder in ("runs/tiny/policy", "no such", "/a/b", "a/b/c"):
        with pytest.raises(FileNotFoundError) as raised:
            find_folder(folder)
        assert "Hub's model" not in str(raised.value)


def test_urls_of_data_sets_are_left_to_fsspec():
    assert hub.is_model(f"{URL}@main/x")
    for url in ("hf://datasets/own/rows", "gs://own/tiny", "own/tiny"):
        assert not hub.is_model(url)


def test_push_replaces_the_policy_in_one_private_commit(fake, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", fake_hub.TOKEN)
    hub.check_target("hf://own/new")
    assert "own/new" not in fake.commits  # a check changes nothing
    url = hub.push(TINY_POLICY, "hf://own/new")
    assert fake.private == {"own/new": True} and len(fake.commits["own/new"]) == 2
    assert url.endswith(f"own/new/commit/{fake.branches['own/new']['main']}")
    assert fake.head("own/new") == FILES | {".gitattributes": b""}

    shards = {"model-00001-of-00002.safetensors": b"", "model.safetensors.index.json": b""}
    fake.commit("own/old", OTHERS | shards | {"config.json": b"old"})
    hub.push(TINY_POLICY, "hf://own/old")
    assert fake.head("own/old") == OTHERS | FILES
    assert len(fake.commits["own/old"]) == 2 and "own/old" not in fake.private
    assert contents(fetch_again("hf://own/old")) == FILES


def test_push_deletes_no_files_of_others(fake, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", fake_hub.TOKEN)
    notes = dict.fromkeys(("results.json", "trainer_state.json", "notes.jinja"), b"{}")
    old_adapters = dict.fromkeys(("adapter_config.json", "adapter_model.safetensors"), b"old")
    fake.commit("own/old", notes | old_adapters | {"vocab.json": b"old"})
    hub.push(TINY_POLICY, "hf://own/old")
    assert fake.head("own/old") == notes | FILES

    new_adapters = dict.fromkeys(old_adapters, b"new")
    (tmp_path / "adapters").mkdir()
    for name, content in new_adapters.items():
        (tmp_path / "adapters" / name).write_bytes(content)
    fake.commit("own/old", notes | FILES | old_adapters)
    hub.push(tmp_path / "adapters", "hf://own/old")
    assert fake.head("own/old") == notes | FILES | new_adapters


def test_all_files_that_a_tokenizer_or_the_weights_are_saved_in_are_replaced(tmp_path):
    tokenizer.load(TINY_POLICY).save(tmp_path)
    names = {path.name for path in tmp_path.iterdir()} | {*hf_tokenizer.HF_FILES}
    names |= {safetensors.INDEX, weights.CONFIG_FILE, lora.CONFIG_FILE, lora.WEIGHTS_FILE}
    assert names <= {*hub.POLICY_FILES}


def test_refused_push_changes_nothing_and_names_the_remedy(fake, monkeypatch):
    with pytest.raises(remote.FetchError, match=r"^hf://own/new: cannot be written without a tok"):
        hub.check_target("hf://own/new")
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(remote.FetchError, match=r"^hf://own/new: the access is refused .* log in"):
        hub.check_target("hf://own/new")
    monkeypatch.setenv("HF_TOKEN", fake_hub.TOKEN)
    fake.refuses_commits = True
    with pytest.raises(SaveError, match=r"^hf://own/tiny: the access is refused .*nothing was pus"):
        hub.push(TINY_POLICY, URL)
    assert fake.head("own/tiny") == FILES | OTHERS
    for url in ("hf://own/new@v1", "hf://own/new/sub", "own/new", "hf://datasets/own/rows"):
        with pytest.raises(ValueError, match=r"^--push = .* must be hf://OWNER/NAME$"):
            hub.check_target(url)
    for name in ("..", "--", "ü", "a..b", "a.git"):
        with pytest.raises(
            remote.FetchError, match=rf"^hf://own/{name}: must be hf://OWNER/NAME \("
        ):
            hub.check_target(f"hf://own/{name}")
