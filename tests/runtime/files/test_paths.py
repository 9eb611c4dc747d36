"""Tests of names of folders."""

import os
import pathlib
import socket

import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from spell_jax.runtime.files import durable, jsonl, paths, remote


@pytest.mark.parametrize("name", ["[x]", "a*b", "a?b", "a\\b", "a\udcffb"])
def test_workdir_from_which_no_checkpoint_can_be_read_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"^workdir = .*could not be read again; must be UTF-8"):
        paths.make_workdir(epath.Path(tmp_path / name))
    assert not list(tmp_path.iterdir())


def test_checkpoint_can_be_read_from_a_workdir_of_other_odd_names(tmp_path):
    folder = epath.Path(tmp_path / "a b%s#{0}'\"$~:|é\n@%20")
    paths.make_workdir(folder)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder / "1", {"a": np.arange(4)})
        assert checkpointer.restore(folder / "1")["a"].tolist() == [0, 1, 2, 3]


def test_home_folder_is_expanded_in_every_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    assert os.fspath(paths.open_folder("~/runs/a")) == "/home/ada/runs/a"
    assert remote.fetch("~") == pathlib.Path("/home/ada")
    for name in ("runs/~", "~ approximately", "gs://b/~/a"):
        assert paths.expand_home(name) == name
    with pytest.raises(ValueError, match=r"^'~nobody_of_this_name/a': no such home folder"):
        paths.expand_home("~nobody_of_this_name/a")


def test_home_folder_is_expanded_by_all_writers(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    jsonl.write_records("~/a/rows.jsonl", [{}])
    jsonl.write_json(pathlib.Path("~/a") / "summary.json", {})
    durable.make_folder("~/b")
    assert os.listdir(tmp_path) == ["home"]
    assert sorted(os.listdir("home/a")) == ["rows.jsonl", "summary.json"]
    assert sorted(os.listdir("home")) == ["a", "b"]
    with pytest.raises(ValueError, match=r"^~/a: is a folder, must be a file"):
        paths.require("~/a", "a file")


def test_bucket_out_of_reach_is_named_at_once(monkeypatch):
    tries, naps = [], []

    def refuse(address, timeout):
        tries.append((address, timeout))
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(paths.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(paths.urllib.request, "getproxies", dict)
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setattr(paths.socket, "create_connection", refuse)
    monkeypatch.setattr(paths.time, "sleep", naps.append)
    paths._why_unreachable.cache_clear()
    message = r"^gs://b/c: storage\.googleapis\.com cannot be reached \(Name or service not known\)"
    try:
        for open_url in (paths.open_folder, remote.fetch):
            with pytest.raises(ValueError, match=message):
                open_url("gs://b/c")
    finally:
        paths._why_unreachable.cache_clear()
    assert tries == [(("storage.googleapis.com", 443), 10.0)] * 3 and sum(naps) == 4.0
