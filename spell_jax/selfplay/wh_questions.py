"""Questions that rules make from sentences: a question word in place of a name or a number.

"The Apollo program was conceived in early 1960." becomes "The Apollo program was conceived in
early which year?" (cloze translation, Lewis et al. 2019, arXiv 1906.04980). No labels are used, and
the answer holds by construction: it stood in the sentence. The sentence stays in the documents, so
the question asks to find it there. English only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from spell_jax.selfplay import cloze

FEWEST_WORDS, MOST_WORDS = 5, 22  # of a question, without the question word
# A longer sentence is a table or a list. Each span is searched, so the time would be quadratic.
LONGEST_SENTENCE = 1000  # characters

# Where a clause may end. A comma alone ends none: it may stand within a list or a date.
_CLAUSE_END = re.compile(
    r"[;:()–—]\s*|,(?= (?:and|but|which|who|while|where|when|although|because|so)\b)\s"
)
# First words that only join a clause to the clause before it.
_JOINING_WORDS = re.compile(
    r"(?:and|but|or|which|that|while|where|when|who|as|with|although|so|because|then|thus|however)"
    r"\b\s*,?\s*",
    re.IGNORECASE,
)
_YEAR = re.compile(r"1\d{3}s?|20\d\ds?")
_MONTH = re.compile(
    r"(?:January|February|March|April|May|June|July|August|September|October|November|December)\b"
)
_PLACE_PREPOSITIONS = frozenset({"in", "at", "from", "to", "near", "across"})
_END_OF_WORD = re.compile(r"[.,;:?]?(?:\s|$)|['’]s\b")
_IN_LIST_BEFORE = re.compile(r"(?:(?:^|[ ,])(?:and|or)|,) $")
_IN_LIST_AFTER = re.compile(r"\s+(?:and|or)\b|, (?:and|or)\b|, [A-Z]")
_MARKS = " ,;:()–—\"'"


def ask_sentence(sentence: str) -> Iterator[tuple[str, str]]:
    """Yield (question, answer) for each name and number that a sentence may be asked for.

    A long sentence gives only the clause around the name or number. Left out are names and numbers
    in brackets, quotes or lists, and parts of a longer word or number.
    """
    if len(sentence) > LONGEST_SENTENCE:
        return
    for span in cloze.answer_spans(sentence):
        matches = list(cloze.occurrences(span).finditer(sentence))
        # A second occurrence would give the answer away. A row of words around "the" is often two
        # names: "in Reyners v Belgium the Court of Justice held".
        if len(matches) != 1 or " the " in span:
            continue
        begin, end = matches[0].span()
        if not _stands_alone(sentence[:begin], sentence[end:]):
            continue
        first, last = _clause(sentence, begin, end)
        before, after = sentence[first:begin], sentence[end:last].rstrip(_MARKS + ".")
        if joining := _JOINING_WORDS.match(before):
            before = before[joining.end() :]
        words = len(cloze.WORD.findall(before)) + len(cloze.WORD.findall(after))
        if not FEWEST_WORDS <= words <= MOST_WORDS or "[" in before + after:
            continue
        text = f"{before}{_question_word(span, before, after)}{after}".strip(_MARKS)
        yield f"{text[0].upper()}{text[1:]}?", span


def _stands_alone(before: str, after: str) -> bool:
    """Return whether a span is a whole word outside brackets, quotes and lists."""
    if (before and before[-1] != " ") or not _END_OF_WORD.match(after):
        return False
    if before.count("(") > before.count(")") or before.count('"') % 2:
        return False
    return not _IN_LIST_BEFORE.search(before) and not _IN_LIST_AFTER.match(after)


def _clause(sentence: str, begin: int, end: int) -> tuple[int, int]:
    """Return (first, last) character of the clause around a span, with at least FEWEST_WORDS."""
    cuts = [0, *(match.end() for match in _CLAUSE_END.finditer(sentence)), len(sentence)]
    lefts = [cut for cut in cuts if cut <= begin]
    rights = [cut for cut in reversed(cuts) if cut >= end]
    first, last = lefts.pop(), rights.pop()
    words_of_span = len(cloze.WORD.findall(sentence[begin:end]))
    while (lefts or rights) and (
        len(cloze.WORD.findall(sentence[first:last])) < FEWEST_WORDS + words_of_span
    ):
        if rights:
            last = rights.pop()
        else:
            first = lefts.pop()
    return first, last


def _question_word(span: str, before: str, after: str) -> str:
    """Choose the question word by the span's form and its neighbors."""
    if _YEAR.fullmatch(span):
        return "which year"
    if _MONTH.search(span) and any(map(str.isdigit, span)):
        return "what date"
    if re.fullmatch(r"[\d.,]+", span):
        return "how many" if re.match(r"\s+[a-z]", after) else "what number"
    if span[0].isdigit():
        return "how much"
    previous = (cloze.WORD.findall(before) or [""])[-1].lower()
    if previous == "by":
        return "whom or what"
    if previous in _PLACE_PREPOSITIONS:
        return "which place or thing"
    return "what" if before.strip() else "who or what"
