"""Cloze questions: a sentence of a document with a gap, filled by words that occur elsewhere.

The reference of such a question holds by construction: the words stood in the gap. They can be
found, because another sentence of the same documents contains them too (recurring spans, Ram et
al. 2021, arXiv 2101.00438). Rules find such questions (`find_clozes`; English only, because of the
list of function words), or a questioner writes them (`check_span`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spell_jax.selfplay.parsing import Parsed

GAP = "____"
LONGEST_SPAN = 5  # words; 95 % of the answers in SQuAD v1.1 dev's articles 1-8 have no more
SHORTEST_SENTENCE = 6  # words; shorter ones say too little about their gap
MOST_PLACES = 50  # sentences with the same span that are compared; more would take quadratic time

# A capital or a digit must follow the mark, so "e.g. this" is not cut. "Dr. Smith" is.
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]?[A-Z0-9])")
# Marks within a word belong to the word: "3.5", "don't" and "Jean-Paul" are one word each.
WORD = re.compile(r"[^\W_]+(?:[.,'’\-–][^\W_]+)*")
# Words that no span begins or ends with, and that do not tell what a sentence is about.
_FUNCTION_WORDS = """
    a about above across after again against all almost also although always am among an and
    another any are around as at away back be became because become been before being below
    between both but by can cannot could did do does done down due during each either else
    enough even ever every few first for from further had has have he her here hers him his how
    however i if in into is it its itself just last least less like made make many may me might
    more most much must my near neither never no nor not now of off often on once one only or
    other others our out over own per perhaps quite rather same second several she should since
    so some still such than that the their them then there these they this those three through
    thus to together too toward two under until up upon us use used using very was we well were
    what when where whether which while who whole whom whose why will with within without would
    yet you your
"""
_IN_NAMES = ("of", "the", "de")
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())


@dataclass(frozen=True)
class Cloze:
    """A sentence with a gap.

    Attributes:
      document: index of the sentence's document.
      sentence: the whole sentence, as it stands in the document.
      span: the words of the gap.
      elsewhere: other sentences with the span, as (index of their document, sentence).
    """

    document: int
    sentence: str
    span: str
    elsewhere: tuple[tuple[int, str], ...]

    @property
    def question(self) -> str:
        """The sentence with a gap instead of every occurrence of the span."""
        return occurrences(self.span).sub(GAP, self.sentence)


def find_clozes(documents: Sequence[str], shared_words: int = 2) -> Iterator[Cloze]:
    """Yield the cloze questions of a cluster, in order of their sentences.

    A span is a proper name, a number or several words, at most LONGEST_SPAN words, in the longest
    form that occurs in another sentence. The question's sentence and another sentence with the span
    share at least `shared_words` other words that are no function words.
    """
    sentences = [
        (n, text) for n, document in enumerate(documents) for text in split_sentences(document)
    ]
    words = [list(WORD.finditer(text)) for _, text in sentences]
    lower = [[word[0].lower() for word in row] for row in words]
    content = [{*row} - FUNCTION_WORDS for row in lower]
    # Each word begins at most LONGEST_SPAN spans, so the index is linear in the text.
    places: dict[tuple[str, ...], set[int]] = defaultdict(set)
    for index, row in enumerate(lower):
        for begin in range(len(row)):
            for end in range(begin + 1, min(begin + LONGEST_SPAN, len(row)) + 1):
                places[tuple(row[begin:end])].add(index)
    for index, (document, text) in enumerate(sentences):
        if len(lower[index]) < SHORTEST_SENTENCE:
            continue
        used_spans: set[tuple[str, ...]] = set()
        for begin, end in _longest_spans(lower[index], places, index):
            key = tuple(lower[index][begin:end])
            span = text[words[index][begin].start() : words[index][end - 1].end()]
            # Without shared words nothing would tell which words fill the gap. An equal sentence,
            # such as a repeated heading, would give the answer away.
            elsewhere = [
                place
                for place in sorted(places[key] - {index})[:MOST_PLACES]
                if len((content[index] & content[place]) - {*key}) >= shared_words
                and sentences[place][1] != text
            ]
            is_answer = _is_answer(span, begin == 0) and not _cuts_name(
                text, words[index], begin, end
            )
            if key in used_spans or not elsewhere or not is_answer:
                continue
            used_spans.add(key)
            yield Cloze(document, text, span, tuple(sentences[place] for place in elsewhere))


def answer_spans(document: str) -> list[str]:
    """Return the names and numbers of a document that may be answers, each once, in order.

    A span is the longest row of words with a capital or a digit, also around "of", "the" and "de",
    of at most LONGEST_SPAN words. A capital alone makes no name of a sentence's first word.
    """
    spans: dict[str, None] = {}
    for sentence in split_sentences(document):
        words = list(WORD.finditer(sentence))
        is_name = [word[0][0].isupper() or word[0][0].isdigit() for word in words]
        begin = 0
        while begin < len(words):
            if not is_name[begin]:
                begin += 1
                continue
            end = _end_of_name(sentence, words, is_name, begin)
            only_first = (begin, end) == (0, 1) and not words[0][0][0].isdigit()
            is_function_word = words[begin][0].lower() in FUNCTION_WORDS
            if not only_first and not is_function_word and end - begin <= LONGEST_SPAN:
                spans[sentence[words[begin].start() : words[end - 1].end()]] = None
            # After a function word, such as "The" in "The Hague", the name is searched without it.
            begin = end if not is_function_word else begin + 1
    return list(spans)


def _end_of_name(
    sentence: str, words: Sequence[re.Match[str]], is_name: Sequence[bool], begin: int
) -> int:
    """Return the index after the last word of the name that begins at a word."""
    end = begin + 1
    for index in range(begin + 1, len(words)):
        # A name ends at any mark: the names of a list are separate answers.
        if sentence[words[index - 1].end() : words[index].start()] != " ":
            break
        if is_name[index]:
            end = index + 1
        elif words[index][0] not in _IN_NAMES:
            break
    return end


def make_gap(parsed: Parsed, shown: Sequence[str], documents: Sequence[str]) -> tuple[Parsed, str]:
    """Turn a questioner's accepted sentence and span into a question; arguments as in `check_span`.

    Return (the parsed question or the reason of its refusal, the sentence). Only the questioner may
    read the sentence.
    """
    if parsed.status != "accepted":
        return parsed, ""
    sentence = parsed.question.strip()
    question, reason = check_span(sentence, parsed.answer, shown, documents)
    if reason:
        return Parsed("bad_format", reason=reason), ""
    return Parsed("accepted", question, parsed.answer.strip()), sentence


def check_span(
    sentence: str, span: str, shown: Sequence[str], documents: Sequence[str]
) -> tuple[str, str]:
    """Check a questioner's sentence and span by string search; return (question, reason).

    The sentence must stand in a `shown` document, and the span in the sentence and in another
    sentence of `documents`. The question has a gap instead of the span. One of the two texts is
    empty. The reason is "not_a_sentence", "short_sentence", "long_span", "not_in_sentence" or
    "not_elsewhere".
    """
    sentence, span = sentence.strip(), span.strip()
    pattern = occurrences(span)
    words = len(WORD.findall(span))
    # Splitting takes longer than searching, so only texts that contain the sentence are split.
    if not any(
        sentence in map(str.strip, split_sentences(text)) for text in shown if sentence in text
    ):
        return "", "not_a_sentence"
    if len(WORD.findall(sentence)) < SHORTEST_SENTENCE:
        return "", "short_sentence"
    if words > LONGEST_SPAN:
        return "", "long_span"
    if not words or not pattern.search(sentence):
        return "", "not_in_sentence"
    # Hidden wherever it stands, because a copy of the sentence is what the responder will not read.
    if not any(pattern.search(text) for text in hide(documents, [sentence])):
        return "", "not_elsewhere"
    return pattern.sub(GAP, sentence), ""


def hide(documents: Sequence[str], sentences: Sequence[str]) -> tuple[str, ...]:
    """Return the documents without the sentences. The sentence "" hides nothing."""
    return tuple(_without(document, sentences) for document in documents)


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences."""
    return [
        part for line in text.splitlines() for part in _SENTENCE_END.split(line) if part.strip()
    ]


def _without(document: str, sentences: Sequence[str]) -> str:
    shorter = document
    for sentence in sentences:
        shorter = shorter.replace(sentence, "")
    # Spaces are mended only where a sentence was removed. Other documents stay as they are.
    return document if shorter == document else re.sub(" {2,}", " ", shorter).strip()


def _longest_spans(
    row: Sequence[str], places: dict[tuple[str, ...], set[int]], index: int
) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of the spans that recur in other sentences, without parts of a span."""
    # Longest first at each word, and never ending within the previous span.
    end_of_last = 0
    for begin in range(len(row)):
        for end in range(min(begin + LONGEST_SPAN, len(row)), max(begin, end_of_last), -1):
            span = tuple(row[begin:end])
            if {span[0], span[-1]} & FUNCTION_WORDS or not places[span] - {index}:
                continue
            yield begin, end
            end_of_last = end
            break


def _is_answer(span: str, is_first: bool) -> bool:
    """Return whether a span is a name, a number or several words.

    A capital of a sentence's first word tells nothing.
    """
    words = span.split()
    named = any(word[0].isupper() for word in words[is_first:])
    return named or any(c.isdigit() for c in span) or len(words) > 1


def _cuts_name(text: str, words: Sequence[re.Match[str]], begin: int, end: int) -> bool:
    """Return whether a word beside a span continues its name, as in "Saturn" of "Saturn V"."""
    after = begin > 1 and text[words[begin - 1].end() : words[begin].start()] == " "
    before = end < len(words) and text[words[end - 1].end() : words[end].start()] == " "
    return (after and words[begin - 1][0][0].isupper()) or (before and words[end][0][0].isupper())


def occurrences(span: str) -> re.Pattern[str]:
    """Match a span where WORD ends words: "11" stands in "11_000" too, but not in "110"."""
    return re.compile(rf"(?<![^\W_]){re.escape(span)}(?![^\W_])", re.IGNORECASE)
