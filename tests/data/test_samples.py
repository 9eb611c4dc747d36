"""Tests of samples: what a written answer lacks, and arrays that do not fit the tokens."""

import dataclasses

import numpy as np
import pytest

from spell_jax.data.samples import Sample

SAMPLED = Sample(
    np.array([5, 6, 2], np.int32),
    np.array([-0.5, -1.0, -0.25], np.float32),
    kept_log_masses=np.zeros(3, np.float32),
    cutoffs=np.zeros(3, np.float32),
    experts=np.zeros((3, 1, 1), np.int8),
    prompt_experts=np.zeros((4, 1, 1), np.int8),
)


def test_stop_token_is_no_content() -> None:
    assert SAMPLED.content == [5, 6]
    assert dataclasses.replace(SAMPLED, stopped=False).content == [5, 6, 2]
    assert dataclasses.replace(SAMPLED, stop_string="c").content == [5, 6, 2]


def test_text_ends_before_its_stop_string() -> None:
    assert SAMPLED.text(str) == "[5, 6]"
    assert dataclasses.replace(SAMPLED, stop_string=", 6").text(str) == "[5"


def test_written_answer_has_no_record_of_a_sampler() -> None:
    written = dataclasses.replace(SAMPLED, stop_string="c").as_written()
    # vars: since Python 3.13, == of dataclasses compares arrays entry by entry.
    assert vars(written) == vars(Sample(SAMPLED.tokens, stop_string="c"))
    truncated = dataclasses.replace(SAMPLED, stopped=False)
    assert vars(truncated.as_written()) == vars(Sample(SAMPLED.tokens, stopped=False))
    assert SAMPLED.logprob == -1.75
    with pytest.raises(ValueError, match=r"sample\.logprobs: is None"):
        written.logprob  # noqa: B018


@pytest.mark.parametrize("name", ["logprobs", "kept_log_masses", "cutoffs", "experts"])
def test_array_of_other_length_than_the_tokens_is_rejected(name: str) -> None:
    array = getattr(SAMPLED, name)
    message = rf"sample\.{name}: of 2 tokens, but the answer has 3"
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SAMPLED, **{name: array[:2]})
