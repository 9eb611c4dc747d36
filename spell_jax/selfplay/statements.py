"""The answer that a response states: strictly as the paper's public code reads it, or leniently.

Leniently, the last statement that can be read counts, whatever its form. Total and linear-time.
"""

import itertools
import re
import unicodedata
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from spell_jax.data.clusters import TEXT_TASKS
from spell_jax.selfplay.braces import BOX, last_box
from spell_jax.selfplay.written_numbers import (
    CORRECTION,
    MAX_CHARACTERS,
    REFUSED,
    read_number,
    with_plain_characters,
    without_commands,
)

_CHAT_MARKERS = ("<｜Assistant｜>", "<｜end▁of▁sentence｜>")
_PLACEHOLDER = "insert answer here"  # the words of the paper's prompt: a copy is no answer


class Statement(NamedTuple):
    """An answer that a text states, and its form, one of rules.FORMS."""

    form: str
    answer: str | None = None


NO_STATEMENT = Statement("unparsed")


def first_line(text: str) -> str:
    """Return the first line of a text without spaces and full stops around it."""
    return text.strip().partition("\n")[0].strip().strip(".").strip()


# ---------------------------------------------------------------------------------- Read strictly

# Without the phrase "answer is", only the last characters of a response are searched, as in the
# paper's public code.
_TAIL_CHARACTERS, _TEXT_TAIL_CHARACTERS = 300, 1000
# Possessive quantifiers prevent backtracking. They change no match, because no part of the pattern
# can use a character that the part before it consumed.
_FIGURE = r"([=≈`%$°£€¥]*+-?+[0-9.,]++(?:[eE][+-]?[0-9]++)?+)"
_FIGURE_PATTERNS = tuple(
    re.compile(lead + figure, re.IGNORECASE)
    for lead in ("the answer is ", "answer is ")
    for figure in (rf"\({_FIGURE}\)", _FIGURE)
)

# The letter is upper case and must not start a word, in any script, with or without accents.
_NO_WORD = r"(?![\w\u0300-\u036f])"
_LETTER_PATTERNS = tuple(
    re.compile(pattern)
    for pattern in (
        r"\\(?i:boxed)\{([A-D])\}",
        r"(?i:correct answer is )\(([A-D])\)",
        rf"(?i:correct answer is )([A-D]){_NO_WORD}",
        r"(?i:answer is )\(([A-D])\)",
        rf"(?i:answer is )([A-D]){_NO_WORD}",
    )
)


def tail_of(text: str, task: str) -> str:
    """Return the part of a response without thoughts that the paper's code searches."""
    announced = "answer is" in text or (task == "financial_math" and r"\boxed" in text)
    tail = _TEXT_TAIL_CHARACTERS if task in TEXT_TASKS else _TAIL_CHARACTERS
    return text if announced else text[-tail:]


def read_strictly(text: str, task: str) -> Statement:
    """Read the statement of a text as the paper's public code does."""
    if task in TEXT_TASKS:
        form, answer = "phrase", _find_phrase(text)
    elif task == "financial_math":
        form, answer = "boxed" if BOX in text else "phrase", _find_figure(text)
    else:
        letter = _find_last(_LETTER_PATTERNS[:1], text)
        form = "boxed" if letter else "phrase"
        answer = letter or _find_last(_LETTER_PATTERNS[1:], text)
    return Statement(form if answer else "unparsed", answer)


def _find_phrase(text: str) -> str | None:
    for removed in ("*", *_CHAT_MARKERS):
        text = text.replace(removed, "")
    for phrase in ("the answer is", "correct answer is", "answer is"):
        # By priority of the phrases, not by their places, as in the public code (spec 5.1).
        _, separator, tail = text.rpartition(phrase)
        if separator:
            answer = first_line(tail)
            return None if _PLACEHOLDER in answer else answer
    return None


def _find_figure(text: str) -> str | None:
    # A box decides even if it holds no number, as in the public code.
    if BOX in text:
        boxed = last_box(text)
        return None if boxed is None else boxed.replace(",", "").rstrip(".")
    figure = _find_last(_FIGURE_PATTERNS, text)
    return None if figure is None else figure.replace(",", "").rstrip(".")


def _find_last(patterns: Sequence[re.Pattern[str]], text: str) -> str | None:
    """Return the last match of the first pattern that matches the text without asterisks."""
    text = text.replace("*", "")
    all_matches = (pattern.findall(text) for pattern in patterns)
    return next((matches[-1] for matches in all_matches if matches), None)


# -------------------------------------------------------------------------------- Read leniently

_MOST_STATEMENTS = 8  # the last ones are read: 100 KB may announce 10,000 answers
_MOST_MENTIONS = 100  # the last ones are checked for being announcements
_MOST_MARKS = 30  # combining characters in a row, as in Unicode's Stream-Safe Text Format
_LONGEST_BARE = 100  # characters of a response that is only an answer
_GAP = r"[\s*_`\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]"
_QUOTED_GAP = _GAP[:-1] + "\"'“”]"
# An announcement is a word with what precedes and follows it. A class of characters comes first,
# because a search that ignores the case is 20 times slower.
_MENTION = re.compile(r"[aA](?:ns(?:wer)?|NS(?:WER)?)|[cC](?:hoice|HOICE)|[oO](?:ption|PTION)")
_BEFORE = 40  # characters that are searched for what precedes
_OBJECT = (
    r"(?: choice| option| letter| value)?"
    r"(?: (?:to|for) (?:the|this|that|your) (?:\w{1,20} )?(?:question|problem|task))?"
)
_IS = rf"(?:is|was|(?:would|should|must|will){_GAP}++be|equals)(?!\w|n['’]t)"
_COLON = re.compile(rf"{_OBJECT}{_QUOTED_GAP}*+[:：=]", re.IGNORECASE)
_PHRASE = re.compile(
    rf"{_OBJECT}{_GAP}++{_IS}(?:{_GAP}++as follows)?(?:{_GAP}*+[:：])?", re.IGNORECASE
)
# "This answer is right" announces nothing.
_OTHER = re.compile(r"\b(?:this|that|your|each|any|no|which|wrong|incorrect)\s$", re.IGNORECASE)
_CHOSEN = re.compile(rf"\b(?:correct|right|best|final|my){_GAP}+$", re.IGNORECASE)
# A heading is a line of its own.
_HEADING = re.compile(r"(?:^|\n)[ \t#>*_]*(?:the |my )?(?:final |correct )?$", re.IGNORECASE)
_LINE_END = re.compile(r"[ \t*_#]*+(?=\n)")
# A sign that ASCII writes as punctuation, and selectors of how a character is shown.
_MARKS_AND_SIGNS = "\N{MINUS SIGN}\ufe0e\ufe0f"
_GAPS = re.compile(rf"{_GAP}*+")
_BULLET = re.compile(r"[-•>–]\s+")
_INVISIBLE = "\u00ad\u200b\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2060\ufeff"

_LETTER_LEAD = re.compile(
    r"(?:(?:the|option|choice|letter|answer|therefore|thus|most|likely|probably|clearly|definitely"
    r"|certainly|indeed|simply)(?!\w)"
    r"|[\s:$\"'“”‘’*_`<])*+",
    re.IGNORECASE,
)
_MARKUP = re.compile(r"\*|\\[()\[\]]|(?<![^\W_])_+|_+(?![^\W_])")  # of emphasis and of formulas
_LETTER = re.compile(r"([(\[{]\s*)?([A-D])(?![\w\u0300-\u036f])(\s*[)\]}])?", re.IGNORECASE)
# The letter is all, or the text of its option follows: "B) Paris", "option B. Paris", "B - Paris".
_LONE_LETTER = re.compile(
    r"(?:_|[^\w\\])*+(?:(?i:option|choice)\W*+)?(?:\\\w++\{)?[\W_]*+\w"
    r"(?:[\W_]*+$|\s*+[).:\]}]|\s++[-–—]\s)"
)
_PART_OF_NAME = re.compile(
    r"['’&+#@/\\-]\w|[&+#]|\.[A-Za-z](?![A-Za-z])"
)  # B's, B-52, A&M, C++, D.C.
_ANOTHER_LETTER = re.compile(
    r"[\s,.)\]}*]*(?:(?i:and|or|nor|vs\.?)(?!\w)|[&/+])\s*"
    r"(?:(?i:option|choice|maybe|perhaps|possibly|even)\s*)*+"
    r"[(\[]?(?:[A-D]|(?i:[b-d])|a(?=\s*[)\].]|\s*$))(?!\w)"
    r"|\s*,\s*[(\[]?[A-D][)\]]?(?:\s*$|\s*[,.;&]|\s+(?i:and|or)\b)"
    rf"|{CORRECTION}[(\[]?[A-D](?!\w)"
)
_NEXT_OPTION = re.compile(r"\s[(\[]?(?:(?i:option|choice)\s)?[A-D][)\]:]\s")
_NO_LETTER = re.compile(
    r"\s*(?:not|no|none|neither|nor|both|either|unknown|unclear|all of)(?!\w)", re.IGNORECASE
)


def read_leniently(text: str, task: str) -> Statement:
    """Read the last statement of a text that can be read, or that withdraws the earlier ones."""
    for marker in _CHAT_MARKERS:
        text = text.replace(marker, "")
    # The last statement counts: an answer may be corrected further on.
    for form, stated in _announced_lines(text, task):
        answer = _read_stated(stated, task, form)
        if answer is not None:
            return Statement(form, answer) if answer else NO_STATEMENT
    # A bare number or letter can be recognized, a bare text cannot.
    text = text.strip()
    if task in TEXT_TASKS or len(text) > _LONGEST_BARE or "\n" in text:
        return NO_STATEMENT
    answer = read_alone(text, task)
    return Statement("bare", answer) if answer else NO_STATEMENT


def _announced_lines(text: str, task: str) -> Iterator[tuple[str, str]]:
    """Yield (form, line) for the text after each announcement and in the last box, last first."""
    # Mentions are found by one search, so a text of nothing but "answer" takes linear time.
    at, box = text.rfind(BOX), last_box(text)
    mentions = deque(_MENTION.finditer(text), _MOST_MENTIONS)
    announced = (_find_announcement(text, mention, task) for mention in reversed(mentions))
    for form, end in itertools.islice(filter(None, announced), _MOST_STATEMENTS):
        if box is not None and end <= at:
            yield "boxed", box
            box = None
        yield form, _line_after(text, end)
    if box is not None:
        yield "boxed", box


def _find_announcement(text: str, mention: re.Match[str], task: str) -> tuple[str, int] | None:
    """Return (form, end) of the announcement with a word; None if the word announces nothing."""
    start, end = mention.span()
    # A slice, because a pattern that looks back from each mention would take quadratic time.
    before = text[max(0, start - _BEFORE) : start]
    # "Choice" and "option" announce letters only: "the option is 5" is no answer in figures.
    is_choice = mention[0][0] not in "aA"
    if before[-1:].isalnum() or (is_choice and task != "multiple_choice"):
        return None
    if match := _COLON.match(text, end):
        return "colon", match.end()
    states = _CHOSEN.search(before) if is_choice else not _OTHER.search(before)
    if states and (match := _PHRASE.match(text, end)):
        return "phrase", match.end()
    if not is_choice and _HEADING.search(before) and (match := _LINE_END.match(text, end)):
        return "colon", match.end()
    return None


def _line_after(text: str, at: int) -> str:
    """Return the first line with text after a place, without marks of emphasis around it."""
    gap = _GAPS.match(text, at)
    start = gap.end() if gap else at
    end = text.find("\n", start)
    line = text[start : len(text) if end < 0 else end]
    # Only a line of its own may be an item of a list: "is - 5" is negative.
    return _BULLET.sub("", line, count=1) if "\n" in text[at:start] else line


def _read_stated(line: str, task: str, form: str) -> str | None:
    """Read the answer at the start of a line; REFUSED if it withdraws one, None if it has none."""
    if _PLACEHOLDER in line:
        return REFUSED
    if task in TEXT_TASKS:
        return _read_text(line)
    if task == "financial_math":
        return read_number(line, alone=form == "boxed")
    return _read_letter(line)


def read_alone(text: str, task: str) -> str | None:
    """Read a text that is only a number or a letter, perhaps with the text of its option."""
    if task == "financial_math":
        return read_number(text)
    # "A train" must not be read as A, so a letter alone needs more than a boundary.
    lone = _LONE_LETTER.match(text[:MAX_CHARACTERS])
    if not lone or _NEXT_OPTION.search(text, lone.end() - 1):
        return None  # "A) Paris B) Lyon" repeats the options
    return _read_letter(text.lstrip("->•– "))


def _read_text(line: str) -> str | None:
    line = line.replace("*", "")
    if "\\" in line:
        line = without_commands(line).strip(" $").removeprefix(r"\(").removesuffix(r"\)")
    first = first_line(line).strip("_`。" + _INVISIBLE).strip(" .")
    return first if any(map(str.isalnum, first)) else None


def _read_letter(line: str) -> str | None:
    """Read the letter at the start of a line; REFUSED if it names several letters or none."""
    line = with_plain_characters(without_commands(line[:MAX_CHARACTERS]))
    line = _MARKUP.sub("", line)
    if _NO_LETTER.match(line):
        return REFUSED
    lead = _LETTER_LEAD.match(line)
    match = _LETTER.match(line, lead.end() if lead else 0)
    if match is None:
        return None
    # A lower-case letter is an answer only with a mark: "a train" begins with an article.
    tail = line[match.end() :]
    is_marked = bool(match[3]) or not tail or tail[0] in ".,:;!)\"'“”’`$"
    if _PART_OF_NAME.match(tail) or not (match[2].isupper() or is_marked):
        return None
    return REFUSED if _ANOTHER_LETTER.match(tail) else match[2].upper()


# ----------------------------------------------------------------------- Words that state a number

LONGEST_SENTENCE = 300  # characters that a judge reads, as many as the paper's code searches
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def number_sentence(text: str, box_decides: bool = False) -> str:
    """Return the words in which a text states a number, at most LONGEST_SENTENCE characters.

    1. A box that `read_leniently` reads, or any box with `box_decides` (as in `read_strictly`): the
       line around the box.
    2. Announcements, such as "the answer is": the words after the one that `read_leniently` reads,
       or after the last one if it reads none.
    3. Otherwise: the last sentence; "" if the text has no letter or digit.
    """
    for marker in _CHAT_MARKERS:
        text = text.replace(marker, "")
    task = "financial_math"
    announced = [pair for pair in _announced_lines(text, task) if pair[1].strip()]
    readable = (pair for pair in announced if _read_stated(pair[1], task, pair[0]) is not None)
    form, line = next(readable, announced[0] if announced else ("bare", ""))
    if form == "boxed" or (box_decides and BOX in text):
        return _line_around(text, text.rfind(BOX))
    return _bare(line[:LONGEST_SENTENCE]) or _last_sentence(text)


def _line_around(text: str, at: int) -> str:
    """Return the line with a place, from half of LONGEST_SENTENCE before the place on."""
    start = max(text.rfind("\n", 0, at) + 1, at - LONGEST_SENTENCE // 2)
    return _bare(text[start : start + LONGEST_SENTENCE].partition("\n")[0])


def _last_sentence(text: str) -> str:
    tail = text.rstrip()[-LONGEST_SENTENCE:]
    lines = [line for line in tail.splitlines() if any(map(str.isalnum, line))]
    return _bare(_SENTENCE_END.split(lines[-1].rstrip())[-1]) if lines else ""


def _bare(words: str) -> str:
    """Return words without emphasis and spaces around them, and without full stops at the end."""
    # A point at the start belongs to the number: ".5 million".
    return words.strip(" \t\r*_`").rstrip(".").strip(" \t\r*_`")


def unify(text: str) -> str:
    """Join equal forms of Unicode and remove what a reader does not see or pronounce."""
    # ASCII has one form only, and nothing invisible.
    if text.isascii():
        return text
    for _ in range(2):  # lowering the case may decompose characters again
        text = unicodedata.normalize("NFKC", _without_stacks(text)).casefold()
    kinds = {character: unicodedata.category(character) for character in set(text)}
    removed = [c for c, kind in kinds.items() if kind == "Cf" or kind[0] == "P"]
    return text.translate(dict.fromkeys(map(ord, [*removed, *_MARKS_AND_SIGNS])))


def _without_stacks(text: str) -> str:
    """Cut runs of combining characters to at most _MOST_MARKS."""
    # Normalizing takes the square of a run's length: 20,000 characters take 6 s.
    first = {c: unicodedata.normalize("NFKD", c)[0] for c in set(text) if not c.isascii()}
    marks = "".join(re.escape(c) for c, base in first.items() if unicodedata.combining(base))
    if not marks:
        return text
    return re.sub(f"[{marks}]{{{_MOST_MARKS},}}", lambda run: run[0][:_MOST_MARKS], text)
