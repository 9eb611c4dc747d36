"""Tests of the text of streams: the pieces of any cut make the whole text."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spell_jax.data.samples import Sample
from spell_jax.serving.responses import PartialText
from tests.serving.running import demo_model

WORDS = demo_model().tokenizer
TEXT = "city of Bela\n- Arvo Oslo 24 12 Bela; naïve 漢字 🙂 ends here"


def stream(ids: list[int], cuts: list[int], sample: Sample, **stops) -> list[str]:
    partial = PartialText(WORDS, "<think>", **stops)
    edges = [0, *sorted({min(cut, len(ids)) for cut in cuts}), len(ids)]
    pieces = [partial.push(ids[a:b]) for a, b in itertools.pairwise(edges)]
    return [*pieces, partial.finish(sample)]


@settings(max_examples=60)
@given(cuts=st.lists(st.integers(0, 60)), strings=st.lists(st.text("city 字ends", min_size=1)))
def test_pieces_of_a_stream_make_the_text(cuts: list[int], strings: list[str]):
    """A stop string ends the text, and no beginning of it is sent before."""
    ids = WORDS.encode(TEXT)
    end, stop = len(ids), ""
    for count in range(1, len(ids) + 1):  # as the sampler: after the first token that completes one
        text = WORDS.decode(ids[:count])
        if complete := [string for string in strings if string in text]:
            end, stop = count, min(complete, key=text.index)
            break
    sample = Sample(np.array(ids[:end], np.int32), stopped=bool(stop), stop_string=stop)
    pieces = stream(ids[:end], cuts, sample, stop_strings=strings)
    assert "".join(pieces) == "<think>" + sample.text(WORDS.decode)


@pytest.mark.parametrize("stop_id", [WORDS.eos_id, WORDS.encode(" Bela")[0]])
def test_stop_tokens_are_no_text(stop_id: int):
    ids = [*WORDS.encode("city of"), stop_id]
    sample = Sample(np.array(ids, np.int32))
    pieces = stream(ids, [1, 2, 3, 4], sample, stop_ids=(stop_id,))
    assert "".join(pieces) == "<think>city of"


def test_beginnings_of_stop_strings_are_held_back():
    partial = PartialText(WORDS, stop_strings=(" of Bela", "zz"))
    ids = WORDS.encode("city of Bern")
    pieces = [partial.push([token]) for token in ids]
    assert pieces[0] == "city" and pieces[1] == "" and "".join(pieces) == "city of Bern"
