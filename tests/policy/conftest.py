"""Fixtures of the tests of Hugging Face folders."""

from pathlib import Path

import pytest

from tests.policy import hf_folders


@pytest.fixture
def small(tmp_path) -> Path:
    """Write a folder with a small byte-level tokenizer and a ChatML template."""
    return hf_folders.write(tmp_path / "small", hf_folders.byte_level())
