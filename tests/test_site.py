"""Tests of the documentation's site: equations, the repository's address, rewritten links."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import types

import markdown
import pytest

from docs.tools import equations, reference, repository, site
from tests.paths import ROOT

ADDRESS = "https://example.org/lab/papers/spell_jax"
PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.fixture
def clone(tmp_path, monkeypatch) -> pathlib.Path:
    """Return an empty repository that stands for this one, without REPOSITORY_URL."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setattr(repository, "ROOT", tmp_path)
    monkeypatch.delenv("REPOSITORY_URL", raising=False)
    return tmp_path


def rewrite(text: str, page: str, repo_url: str = "") -> str:
    """Return the text of a page of the site."""
    file = types.SimpleNamespace(src_uri=page)
    config = types.SimpleNamespace(repo_url=repo_url)
    return site.on_page_markdown(text, types.SimpleNamespace(file=file), config)


# --------------------------------------------------------------------------------------- Equations


def test_equations_become_mathml():
    text = markdown.markdown(
        "With $`x_1 < 2`$ and `$5`:\n\n```math\n\\frac{a}{b} \\\\\n```\n",
        extensions=["pymdownx.superfences", equations.Equations()],
        extension_configs={
            "pymdownx.superfences": {
                "custom_fences": [
                    {"name": "math", "class": "equation", "format": equations.format_block}
                ]
            }
        },
    )
    assert text.count('display="inline"') == 1 and text.count('display="block"') == 1
    assert "<msub><mi>x</mi><mn>1</mn></msub><mo>&#x0003C;</mo><mn>2</mn>" in text
    assert "<mfrac><mrow><mi>a</mi></mrow><mrow><mi>b</mi></mrow></mfrac>" in text
    assert "<code>$5</code>" in text and "`" not in text


def test_bars_of_an_absolute_value_have_one_height():
    text = equations.to_mathml(r"\lvert y_i \rvert")
    assert text.count('<mo stretchy="false" lspace="0" rspace="0">&#x0007C;</mo>') == 2


@pytest.mark.parametrize("tex", [r"\unknown{x}", r"\frac{a", r"x^{\other}"])
def test_mistakes_in_equations_are_errors(tex):
    with pytest.raises(ValueError, match=r"equation '.*': "):
        equations.to_mathml(tex)


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_equations_of_pages_have_the_forms_that_repository_pages_draw(page):
    """Fenced blocks and code between dollar signs; GitHub reads other dollar signs differently."""
    text = page.read_text()
    for tex in re.findall(r"^```math\n(.*?)^```", text, re.M | re.S):
        equations.to_mathml(tex, "block")
    prose = re.sub(r"^```.*?^```|^    .*?$", "", text, flags=re.M | re.S)
    for tex in re.findall(r"\$`([^`]*)`\$", prose):
        assert "\n" not in tex and "|" not in tex, "a line break or a table's bar in an equation"
        equations.to_mathml(tex)
    assert "$$" not in prose


# ------------------------------------------------------------------------------------------ Address


@pytest.mark.parametrize(
    "remote",
    [
        *(ADDRESS, f"{ADDRESS}.git", f"{ADDRESS}/"),
        "https://user:secret@example.org/lab/papers/spell_jax.git",
        "http://example.org/lab/papers/spell_jax",
        "git@example.org:lab/papers/spell_jax.git",
        "ssh://git@example.org:2222/lab/papers/spell_jax.git",
    ],
)
def test_addresses_of_remotes(remote, clone):
    subprocess.run(["git", "remote", "add", "origin", remote], cwd=clone, check=True)
    assert repository.find_address() == ADDRESS


@pytest.mark.parametrize(
    "remote",
    [
        "",
        "/srv/spell_jax",
        "../spell.jax/main",
        "file:///srv/a/b",
        "https://localhost/a/b",
        "host:a/b",
    ],
)
def test_remotes_without_a_public_address(remote, clone):
    if remote:
        subprocess.run(["git", "remote", "add", "origin", remote], cwd=clone, check=True)
    assert repository.find_address() == ""


def test_port_of_a_web_address_is_kept():
    assert (
        repository.to_address("https://example.org:8443/a/b.git") == "https://example.org:8443/a/b"
    )


def test_variable_overrides_the_remote(clone, monkeypatch):
    monkeypatch.setenv("REPOSITORY_URL", ADDRESS)
    assert repository.find_address() == ADDRESS
    monkeypatch.setenv("REPOSITORY_URL", "spell_jax")
    with pytest.raises(ValueError, match="REPOSITORY_URL = 'spell_jax': must be https://"):
        repository.find_address()


def test_notebook_installs_from_the_address():
    old = (ROOT / "docs" / "colab.ipynb").read_text()
    new = repository.fill_source(old, ADDRESS)
    cell = next(cell for cell in json.loads(new)["cells"] if cell["cell_type"] == "code")
    assert f'SOURCE = "{ADDRESS}"\n' in cell["source"]
    assert new == old.replace(r"SOURCE = \"\"\n", rf"SOURCE = \"{ADDRESS}\"\n")
    with pytest.raises(ValueError, match="is 0 times in the notebook"):
        repository.fill_source(new, ADDRESS)


# -------------------------------------------------------------------------------------------- Links


def test_links_to_sources_lead_to_the_reference():
    assert rewrite("[a](../spell_jax/config.py)", "a.md") == "[a](reference/config.md)"
    assert rewrite("[a](../../spell_jax/learner/loss_config.py)", "howto/a.md") == (
        "[a](../reference/config.md#configloss)"
    )
    assert rewrite("[a](../launch/plan.py)", "a.md") == "[a](reference/commands.md#launchplan)"
    assert rewrite("[a](docs/data.md#b)", "index.md") == "[a](data.md#b)"
    assert rewrite("[a](../examples/counting.py)", "a.md") == "[a](examples/counting.md)"
    for path in reference.source_links():
        assert (ROOT / path).is_file(), path


def test_other_files_are_linked_if_the_repository_has_an_address():
    text = "[a](../launch/experiments/registry.py)"
    assert rewrite(text, "a.md") == "a"
    expected = f"[a]({ADDRESS}/blob/main/launch/experiments/registry.py)"
    assert rewrite(text, "a.md", ADDRESS) == expected
