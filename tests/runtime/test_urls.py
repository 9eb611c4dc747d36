"""Tests of secrets in URLs: refused in configs, flags and fetches, and not repeated."""

import json

import pytest

from spell_jax.algorithms import registry
from spell_jax.config import default_config
from spell_jax.runtime import config, entry, urls
from spell_jax.runtime.config import build, plain
from spell_jax.runtime.endpoint import EndpointConfig
from spell_jax.runtime.files import remote
from tests.runtime.test_config import Example

SECRET = "hunter2"
REFUSED = [
    f"http://user:{SECRET}@host/v1",
    f"http://user:{SECRET}/with-slash@host/v1",
    *(f"http://user:{sign}{SECRET}@host/v1" for sign in "?#"),
    *(f"{start}user:{SECRET}@host/v1" for start in ("//", "http:/")),
    f"https://{SECRET}@host/v1",
    f"s3://id:{SECRET}@bucket/folder",
    f"user:{SECRET}@host/v1",
    f"zip://a.txt::http://user:{SECRET}@host/b.zip",
    *(
        f"https://host/v1?x=1&{name}={SECRET}"
        for name in (
            *("api_key", "apikey", "key", "sig", "token", "access_token", "hf_token", "password"),
            *("X-Amz-Signature", "X-Goog-Credential", "AWSAccessKeyId", "subscription-key"),
            *("code", "hapikey", "session_id", "x-api-key"),
        )
    ),
    f"https://host/#access_token={SECRET}",
]
ACCEPTED = [
    *("", "runs/demo", "/data/a:b/c@d", "http://host:80/v1", "http://[::1]:80/v1", "gs://b/x@y"),
    *("abfs://folder@account.dfs.core.windows.net/x", "hf://datasets/o/n@main/x", "C:/x@y"),
    *("sftp://user@host/x", "s3://b/k?versionId=1", "http://host/v1?keyword=1", "a b: c@d"),
    *("http://host/v1?sort_key=name", "http://host/v1?zipcode=8000"),
]


@pytest.mark.parametrize("url", REFUSED)
def test_secret_is_refused_without_being_repeated(url: str, capsys, monkeypatch) -> None:
    with pytest.raises(
        ValueError, match=r"^data.source = .*leave it out.*SPELL_ENDPOINT_KEY"
    ) as info:
        urls.check_secret("data.source", url)
    assert SECRET not in str(info.value)
    with pytest.raises(ValueError, match=r"^url = .*leave it out") as info:
        EndpointConfig(url, "m", key_name="A_KEY")
    assert SECRET not in str(info.value)
    for arguments in ([f"--judge_url={url}"], ["--judge_url", url]):
        monkeypatch.setattr("sys.argv", ["command", *arguments])
        with pytest.raises(SystemExit) as ended, entry.user_errors():
            pass
        error = capsys.readouterr().err
        assert ended.value.code == 2 and error.startswith("error: --judge_url = ")
        assert SECRET not in error


@pytest.mark.parametrize("url", ACCEPTED)
def test_other_addresses_are_accepted(url: str) -> None:
    urls.check_secret("data.source", url)


def test_every_text_of_a_config_is_checked() -> None:
    secret = f"http://user:{SECRET}@host"
    for field, value in (("name", secret), ("pair", (1, secret)), ("maybe", secret)):
        with pytest.raises(ValueError, match=rf"^part.{field}.* a name or a password") as info:
            build(Example, {"count": 1, field: value}, "part")
        assert SECRET not in str(info.value)


def test_fetch_refuses_a_secret() -> None:
    with pytest.raises(ValueError, match="a name or a password") as info:
        remote.fetch(f"http://user:{SECRET}@127.0.0.1:9/file")
    assert SECRET not in str(info.value)


def test_config_of_a_run_has_no_key(monkeypatch) -> None:
    monkeypatch.setenv("SPELL_JUDGE_KEY", SECRET)
    section = default_config().algorithm
    section.rule, section.judge_model = "judge", "m"
    section.judge_url = "http://host/v1"
    assert SECRET not in json.dumps(plain(config.section(registry.read_algorithm(section))))
    section.judge_url = f"http://user:{SECRET}@host/v1"
    with pytest.raises(ValueError, match=r"^algorithm.judge_url = ") as info:
        registry.read_algorithm(section)
    assert SECRET not in str(info.value)
