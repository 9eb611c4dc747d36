"""Read the single number that a text states, as people write it: "$(1,204) thousand" is -1204000.

The lenient counterpart of numbers.parse_number. Scale words are applied, brackets around a whole
figure mean a loss, as in financial filings, and what is no single number (a range, a date, a list,
a version) is refused instead of computed. Only the first MAX_CHARACTERS of a text are read, so that
the time is bounded for any text.
"""

import math
import re
import unicodedata
from fractions import Fraction

from spell_jax.selfplay.numbers import LARGEST, calculate, number_text

MAX_CHARACTERS = 200
REFUSED = ""  # the text states something, but no single number

# --------------------------------------------------------------------------------- Plain characters

_SUPERSCRIPTS = str.maketrans("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "+-0123456789")
_SUPERSCRIPT_RUN = re.compile("[⁺⁻⁰¹²³⁴-⁹]+")
_SIGNS = {"\N{MINUS SIGN}": "-", **dict.fromkeys("×✕✖⨯⋅·∙", "*"), **dict.fromkeys("÷∕⁄", "/")}
_SIGNS |= {**dict.fromkeys("≅≃", "≈"), **dict.fromkeys("∼〜", "~"), **dict.fromkeys("’‘ʼ", "'")}
_SIGNS |= {**dict.fromkeys("“”„«»`", '"'), **dict.fromkeys("％﹪٪", "%"), "٫": ".", "٬": ","}
# Asterisks between operands are products and powers; elsewhere they are marks of emphasis.
_EXACT_ASTERISK = re.compile(r"(?<=[\d)}]) ?\*{1,2} ?(?=[\d(\\])")

# A command with one argument that only changes how the argument looks.
_STYLED = re.compile(
    r"\\(?:text\w{0,6}|math\w{0,4}|operatorname|mbox|hbox|boldsymbol|bm|boxed|fbox|emph|underline)"
    r"\s*\{([^{}]*)\}"
)
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_PLAIN_TERM = re.compile(r"\s*-?[\d.,]+\s*")
_LATEX = (
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\(?:left|right|displaystyle|[bB]igg?[lr]?)(?![A-Za-z])|\\[()\[\]!]"), ""),
    (re.compile(r"\\(?:[,;:> ~]|q?quad(?![A-Za-z]))"), " "),
    (re.compile(r"\\(?:times|cdot)(?![A-Za-z])"), "*"),
    (re.compile(r"\\div(?![A-Za-z])"), "/"),
    (re.compile(r"\\(?:approx|simeq|cong)(?![A-Za-z])"), "≈"),
    (re.compile(r"\\sim(?![A-Za-z])"), "~"),
    (re.compile(r"\\pm(?![A-Za-z])"), "±"),
    # Functions, because a template makes Python import a module when it is first used.
    (re.compile(r"\\([$%#&_])"), lambda match: match[1]),
    (re.compile(r"\\sqrt\s*\{([^{}]*)\}"), lambda match: f"({match[1]})^0.5"),
    (re.compile(r"\^\{([^{}]*)\}"), lambda match: f"^{match[1]}"),
)
_DEPTH = 4  # of commands within commands, which are resolved from the innermost


def without_commands(text: str) -> str:
    r"""Replace LaTeX commands that only style their argument by it: "\text{B}" becomes "B"."""
    for _ in range(_DEPTH):
        text, count = _STYLED.subn(lambda match: match[1], text)
        if not count:
            break
    return text


def with_plain_characters(text: str) -> str:
    """Replace characters by ASCII characters of the same meaning, and currencies by "$".

    Characters without width (joiners, marks of direction, soft hyphens) are removed.
    """
    return text.translate({ord(c): _plain_character(c) for c in set(text) if not c.isascii()})


def _plain_text(text: str) -> str:
    """Write a number's text in ASCII, without LaTeX and marks of emphasis."""
    # Superscripts first: NFKC would turn "10²" into "102".
    text = _SUPERSCRIPT_RUN.sub(lambda run: "^" + run[0].translate(_SUPERSCRIPTS), text)
    text = with_plain_characters(text)
    text = _EXACT_ASTERISK.sub(lambda match: "^" if "**" in match[0] else "×", text)
    text = text.replace("*", "").replace("×", "*").replace("`", "")
    if "\\" in text:
        for pattern, replacement in _LATEX:
            text = pattern.sub(replacement, text)
        for _ in range(_DEPTH):
            text, count = _FRACTION.subn(_write_fraction, without_commands(text))
            if not count:
                break
    return text.replace("{", "").replace("}", "").strip(" \t\r\n\"'_")


def _plain_character(character: str) -> str:
    if character in _SIGNS:
        return _SIGNS[character]
    category = unicodedata.category(character)
    compatible = unicodedata.normalize("NFKC", character)
    if category[0] != "N" and len(compatible) == 1 and compatible.isascii():
        return compatible  # full-width, bold or circled
    if category == "Nd":
        return str(unicodedata.decimal(character))
    if category == "No" and "<fraction>" in unicodedata.decomposition(character):
        return " " + compatible.replace("⁄", "/")
    return {"Cf": "", "Zs": " ", "Sc": "$", "Pd": "-"}.get(category, character)


def _write_fraction(match: re.Match[str]) -> str:
    above, below = match[1] or match[2] or "", match[3] or match[4] or ""
    if _PLAIN_TERM.fullmatch(above) and _PLAIN_TERM.fullmatch(below) and "-" not in below:
        return f" {above.strip()}/{below.strip()} "
    return f"(({above})/({below}))"


# ------------------------------------------------------------------------------------------ Figures

# Decimals, and digits in groups. The first pattern that matches decides. Two separators settle
# which separator is for decimals. A single separator is read the English way: a point is for
# decimals, a comma for thousands.
_NO_DIGITS = r"(?!\d|[.,'_]\d| \d)"
_FIGURES = tuple(
    re.compile(figure + _NO_DIGITS)
    for figure in (
        r"\d{1,3}(?:,\d{3})++(?:\.\d+)?",
        r"\d{1,2}(?:,\d\d(?=,))++,\d{3}(?:\.\d+)?",  # Indian: lakhs and crores
        r"\d{1,3}(?:\.\d{3})++,\d+",
        r"\d{1,3}(?:\.\d{3}){2,}+",
        r"\d{1,3}([ '_])\d{3}(?:\1\d{3})*+(?:[.,]\d+)?",
        r"\d++(?:\.\d*+)?",
        r"\.\d++",
    )
)
_POINT_GROUPS = re.compile(r"\d{1,3}(?:\.\d{3}){2,}|\d{1,3}(?:\.\d{3})+,\d+")
_EXPONENT = re.compile(r"[eE][+-]?\d{1,3}(?!\w)")
_POWER_OF_TEN = re.compile(r"\s*[*xX]\s*10\s*\^\s*\(?([+-]?\d{1,3})\)?(?!\w)")
_MIXED = re.compile(r"(\d{1,9}) +(\d{1,9})/(\d{1,9})(?![\d/.])")
_OPERATION = re.compile(r"\s*(?:\^\s*-?|[*/+]|[xX](?=\s*[\d(]))\s*[\d(.]")
_RUN = re.compile(r"(?:[\d.,()\s*/xX+]|\^\s*-?)*[\d)]")
_YEARS = range(1900, 2100)  # "12/2019" is a month and "2019/20" a fiscal year, not a quotient

_SCALES: dict[str, int] = {"hundred": 10**2, "thousand": 10**3, "million": 10**6}
_SCALES |= {"billion": 10**9, "trillion": 10**12, "quadrillion": 10**15, "dozen": 12}
_SCALES |= {"lakh": 10**5, "crore": 10**7}
_SHORT_SCALES = {"k": 10**3, "m": 10**6, "mm": 10**6, "mn": 10**6, "mln": 10**6, "mio": 10**6}
_SHORT_SCALES |= {"mrd": 10**9}
_SHORT_SCALES |= {"b": 10**9, "bn": 10**9, "bln": 10**9, "t": 10**12, "tn": 10**12, "trn": 10**12}
_SHORT_SCALES |= {"百": 10**2, "千": 10**3, "万": 10**4, "萬": 10**4, "亿": 10**8, "億": 10**8}
_SCALE_WORD = re.compile(rf"[\s-]*({'|'.join(_SCALES)})s?(?![A-Za-z])", re.IGNORECASE)
_SHORT_WORD = re.compile(
    r"\s*(mn|mln|mio|mrd|bn|bln|tn|trn|百|千|万|萬|亿|億)(?![A-Za-z])", re.IGNORECASE
)
# A single letter may be a unit, so it is a scale next to a currency, or attached to the figure.
_LETTER_WITH_CURRENCY = re.compile(r"\s?(k|K|MM|mm|M|m|B|b|T)(?![A-Za-z0-9'])")
_LETTER = re.compile(r"(k|K|MM|M|m|B)(?![A-Za-z0-9'])")
_IN_SCALE = re.compile(
    r"\s*[(,]?\s*in\s+(?:(?:US|USD|US\$|\$)\s*)?(thousand|million|billion|trillion)s?(?![A-Za-z])",
    re.IGNORECASE,
)
_BRACKETED_SCALE = re.compile(r"\s*\((thousand|million|billion|trillion)s?\)", re.IGNORECASE)
_PERCENT = re.compile(r"\s*(?:%|per ?cent(?![A-Za-z]))", re.IGNORECASE)

# -------------------------------------------------------------------------------- Around the number

_LEAD = re.compile(
    r"(?:(?:about|approximately|approx\.|approx|roughly|around|nearly|almost|circa|ca\.|over|"
    r"just|exactly|precisely|only|simply|therefore|thus|hence|then|now|likely|probably|some|"
    r"equal to|equals|estimated at|(?:the|an?) (?:number|value|amount|figure|total|sum)(?: of)?)"
    r"(?!\w)\s*+"
    r"|[~≈=:\s\"']++|,\s)*+",
    re.IGNORECASE,
)
_CURRENCY = re.compile(
    r"(?:(?:US|USD|CA|AU|A|C|HK|NZ|S|R) ?)?\$\s*|(?:USD|EUR|GBP|CNY|RMB|JPY|CHF|INR|AUD|CAD|HKD|SGD"
    r"|KRW|BRL|MXN|SEK|NOK|DKK|ZAR|US|Rs\.?)(?![A-Za-z])\s*"
)
_SIGN = re.compile(r"(?:-|(?:minus|negative)(?![A-Za-z]))\s*", re.IGNORECASE)
_SKIPPED = re.compile(r"\+\s*(?=[\d$.])")
_OPENED = re.compile(r"\(\s*")
_CLOSED = re.compile(r"[^()\d]{0,30}\)")
_MONTH = "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
# Words at the start that withdraw a number, or state bounds.
_WITHDRAWN = re.compile(
    r"(?:not|no|none|nothing|unknown|unclear|undefined|undetermined|indeterminate|impossible|n/?a|"
    rf"between|either|neither|from|at least|at most|up to|(?:more|less|fewer|greater) than|cannot|"
    rf"(?:{_MONTH})[a-z]*\.? \d)"
    r"(?![A-Za-z])|[<>≤≥±]",
    re.IGNORECASE,
)
_NUMBER_WORD = (
    "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|"
    "sixteen|seventeen|eighteen|nineteen|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety"
)
_MEASURE = "cents?|pence|inch(?:es)?|seconds?|minutes?|hours?|days?|weeks?|months?|ounces|grams?"
_DOUBT = r"(?:(?:about|maybe|perhaps|possibly|probably|even)\s+)*+"
# "5. Wait, no, 7" and "A. Actually, it is B" withdraw an answer, if another one follows.
CORRECTION = (
    r"(?i:\W*(?:(?:wait|no|actually|sorry|oops|hmm|correction|i mean|make that|rather)\W+)++"
    r"(?:(?:it|that)(?:'s| is| should be)\s+)?)"
)
# What after a number shows that it is one of several, or part of something else.
_MORE = re.compile(
    rf"(?i:\s*(?:[-/:^*+~±→]|\+/-|(?:to|or|and|through|versus|vs\.?|until|by)(?![A-Za-z]))"
    rf"\s*[$(+~>\s-]*{_DOUBT}\$?(?:\d|(?:{_NUMBER_WORD})(?![A-Za-z])))"
    r"|(?i:[\s,(]*or\s+(?:maybe|perhaps|possibly)(?!\w))"  # but "0.05, or 5%" says it again
    r"|\s*[;|]\s*\$?[\d.,]+%?\s*(?:[;|]|$)|\s*\\(?:overline|bar|dot)(?![a-z])"
    rf"|{CORRECTION}\$?\d"
    r"|\s*,\s*\$?\d|\s+[$(]*\d|\.*\d|[.,']\d|[A-Za-z]+\s*\d"
    r"|(?i:\s*and\s+(?:a|one|three)\s+(?:half|quarter|third))"
    rf"|(?:st|nd|rd|th)?(?:\s+of)?\s+(?:{_MONTH})[a-z]*\.?(?!\w)|\s*(?i:[ap]\.?m)(?!\w)"
    rf"|(?i:\s*[a-z]+,?(?:\s+and)?\s+\d+\s+(?:{_MEASURE})(?!\w))"
)
_ASIDE = re.compile(r"one\s+(?:of|that|which|who|whose|where|such)(?!\w)", re.IGNORECASE)
_PROSE = re.compile(r"[A-Za-z]{2,} +[A-Za-z]{2,}")
_TRUTH = re.compile(r"(yes|no|true|false)(?:[.!]*+$|[,;] *+[A-Za-z])", re.IGNORECASE)
_MOST_WORDS = 4  # of a unit after a figure that stands alone: "millions of US dollars"


def read_number(text: str, alone: bool = True) -> str | None:
    """Return the number that a text states, in digits; REFUSED or None if there is none.

    `alone`: the text is only a number, with at most a unit after it, or "yes", "no", "true" or
    "false", which are returned in lower case. Otherwise a sentence may go on after the number.
    REFUSED means that the text states something else where the number should be, such as a range.
    """
    if alone and len(text) > MAX_CHARACTERS:
        return None
    plain = _plain_text(text[:MAX_CHARACTERS])
    if truth := _TRUTH.match(plain):
        return truth[1].lower()
    number, tail = _leading_number(plain)
    # Both signs, because the last side of an equation is its result.
    sign = max(plain.rfind("="), plain.rfind("≈"))
    # The last side of "x = 5" or "1/3 ≈ 0.333" counts, but not one within a sentence.
    if sign >= 0 and not number and not _PROSE.search(plain[:sign]):
        number, tail = _leading_number(plain[sign + 1 :])
    if not number and alone and plain.startswith("(") and "-" not in plain:
        number, tail = _compute_operation(plain.rstrip(".")), ""
    if number and alone and (re.search(r"\d", tail) or len(tail.split()) > _MOST_WORDS):
        return REFUSED
    return number


def _leading_number(plain: str) -> tuple[str | None, str]:
    """Return the number at the start of a plain text, as read_number does, and what follows it."""
    at = _skip(_LEAD, plain, 0)
    if _WITHDRAWN.match(plain, at):
        return REFUSED, ""
    # Currency, sign and bracket come in any order: "-$5", "$-5" and "$(5)".
    signs, opened, currency, moved = 0, False, False, True
    while moved:
        moved = False
        for pattern in (_CURRENCY, _SIGN, _SKIPPED, *(() if opened else (_OPENED,))):
            if match := pattern.match(plain, at):
                at, moved = match.end(), True
                signs += pattern is _SIGN
                currency |= pattern is _CURRENCY
                opened |= pattern is _OPENED
    # Two signs, such as "--5", may mean anything.
    if signs > 1:
        return REFUSED, ""
    magnitude = _unsigned_number(plain, at)
    if magnitude is None:
        return None, ""
    digits, at = magnitude
    if not digits:
        return REFUSED, ""
    digits, at = _apply_scale(digits, plain, at, currency)
    if opened:
        closed = _CLOSED.match(plain, at)
        if not closed:
            return REFUSED, ""
        digits, at = _apply_scale(digits, plain, closed.end(), currency)
    tail = plain[at:]
    if not digits or _MORE.match(tail) or tail.lstrip()[:1] in ("=", "≈"):
        return REFUSED, ""
    # Brackets around a figure mean a loss, as in financial filings.
    return ("-" if signs or opened else "") + digits, tail


def _skip(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


def _unsigned_number(plain: str, at: int) -> tuple[str, int] | None:
    """Return (digits or REFUSED, end) of the unsigned number at a place; None if there is none."""
    if not re.match(r"\.?\d", plain[at:]):
        return None if _ASIDE.match(plain, at) else _read_words(plain, at)
    if match := _MIXED.match(plain, at):
        integer, above, below = map(int, match.groups())
        digits = _digits(integer + Fraction(above, below)) if below else None
        return digits or REFUSED, match.end()
    match = next((m for pattern in _FIGURES if (m := pattern.match(plain, at))), None)
    if match is None:
        return REFUSED, at
    digits, end = _remove_groups(match[0]), match.end()
    if exponent := _EXPONENT.match(plain, end):
        digits, end = digits + exponent[0], exponent.end()
    if power := _POWER_OF_TEN.match(plain, end):
        return _multiply(digits, Fraction(10) ** int(power[1])), power.end()
    if _OPERATION.match(plain, end) and (run := _RUN.match(plain, at)):
        is_name = plain[run.end() : run.end() + 1].isalpha()  # 0x1F
        return REFUSED if is_name else _compute_operation(run[0]), run.end()
    return (digits if abs(float(digits)) <= LARGEST else REFUSED), end


def _remove_groups(figure: str) -> str:
    figure = re.sub("[ '_]", ",", figure)
    if _POINT_GROUPS.fullmatch(figure):
        figure = figure.replace(".", "").replace(",", ".")
    elif re.fullmatch(r"\d{1,3}(?:,\d{3})+,(?:\d{1,2}|\d{4,})", figure):  # "1 234,56"
        figure = ".".join(figure.rsplit(",", 1))
    figure = figure.replace(",", "").rstrip(".")
    return f"0{figure}" if figure.startswith(".") else figure


def _compute_operation(run: str) -> str:
    """Return the value of "1/2" or "3*4"; "" for "12/31/2019" and other dates."""
    if run.count("/") > 1:
        return REFUSED
    if parts := re.fullmatch(r"(\d{1,4})/(\d{2,4})", run):
        first, second = map(int, parts.groups())
        is_month = first <= 31 and second in _YEARS
        if is_month or (first in _YEARS and second in (first + 1, (first + 1) % 100)):
            return REFUSED
    return _digits(calculate(run.lower())) or REFUSED


def _apply_scale(digits: str, plain: str, at: int, currency: bool) -> tuple[str, int]:
    """Apply a percent sign (which changes nothing) or scale words after a number's digits."""
    if percent := _PERCENT.match(plain, at):
        return digits, percent.end()
    scale = Fraction(1)
    letters = _LETTER_WITH_CURRENCY if currency else _LETTER
    for pattern in (
        letters,
        _SCALE_WORD,
        _SHORT_WORD,
        _SHORT_WORD,
        _SCALE_WORD,
        _BRACKETED_SCALE,
        _IN_SCALE,
    ):
        if match := pattern.match(plain, at):
            name, at = match[1].lower(), match.end()
            scale *= _SCALES.get(name) or _SHORT_SCALES[name]
    return (digits if scale == 1 else _multiply(digits, scale)), at


def _multiply(digits: str, factor: Fraction) -> str:
    # Exact, so that 0.1 million is 100000. A float first: an exact fraction of 1e-999 would be slow
    # to make.
    if not digits or not 0 <= float(digits) <= LARGEST or (float(digits) == 0 and "e" in digits):
        return REFUSED
    return _digits(Fraction(digits) * factor) or REFUSED


def _digits(value: Fraction | float | None) -> str | None:
    """Write a value in digits; None if it is too large."""
    if value is None or not math.isfinite(value) or abs(value) > LARGEST:
        return None
    # The limit of numbers.number_text: larger values have an exponent.
    if value == int(value) and abs(value) < 1e21:
        return str(int(value))
    return number_text(float(value))


# -------------------------------------------------------------------------------------------- Words

_UNITS = {word: value for value, word in enumerate(_NUMBER_WORD.split("|")[:20])}
_TENS = {word: 10 * value for value, word in enumerate(_NUMBER_WORD.split("|")[20:], 2)}
_PARTS = {"half": 2, "halves": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "tenth": 10}
_WORD = re.compile(r"(?:[\s-]|,\s)*([A-Za-z]+)")
_A_FEW = ("hundred", "thousand", "million", "billion", "trillion", "dozen", "half", *_PARTS)
_MOST_NUMBER_WORDS = 24


def _read_words(plain: str, at: int) -> tuple[str, int] | None:
    """Return (digits, end) of a number in words, as `_unsigned_number` does."""
    words, ends = [], []
    while len(words) < _MOST_NUMBER_WORDS and (match := _WORD.match(plain, at)):
        words.append(match[1].lower())
        at = match.end()
        ends.append(at)
    count, value = _word_value(words)
    if not count:
        return None
    return (REFUSED if value is None else _digits(value) or REFUSED), ends[count - 1]


def _word_value(words: list[str]) -> tuple[int, Fraction | None]:
    """Return how many of the words are a number, and its value; None if they do not fit."""
    # `current` is the part below the next scale word, `total` the sum of the parts before.
    total, current, at = Fraction(0), None, 0
    while at < len(words):
        word, following = words[at], words[at + 1 : at + 2]
        scale = _SCALES.get(word) or _SCALES.get(word.removesuffix("s"))
        part = _PARTS.get(word) or _PARTS.get(word.removesuffix("s"))
        if word in _UNITS or word in _TENS:
            value = _UNITS.get(word, _TENS.get(word, 0))
            room = 100 if word in _TENS or value > 9 else 10
            if current is not None and (not current or current % room or not value):
                return at + 1, None  # "five six"
            current = (current or Fraction(0)) + value
        elif word in ("a", "an") and current is None and following and following[0] in _A_FEW:
            current = Fraction(1)
        elif word == "and" and at and following and (current is None or current % 10 == 0):
            if following[0] not in (*_UNITS, *_TENS):
                break
        elif word == "and" and words[at + 1 : at + 3] in (["a", "half"], ["one", "half"]):
            current, at = (current or Fraction(0)) + Fraction(1, 2), at + 2
        elif word == "half" and current is None and not at:
            current, at = Fraction(1, 2), at + (following == ["a"])
        elif word == "point" and current is not None and following and following[0] in _UNITS:
            decimals = _count_digit_words(words[at + 1 :])
            text = "".join(str(_UNITS[word]) for word in words[at + 1 : at + 1 + decimals])
            current, at = current + Fraction(int(text), 10 ** len(text)), at + decimals
        elif word == "of" and at and following == ["a"] and words[at + 2 : at + 3] != []:
            if words[at - 1].removesuffix("s") not in _PARTS or words[at + 2] not in _SCALES:
                break
            at += 1  # "a quarter of a million"
        elif part and current is not None and 0 < current < 20 and not total:
            current /= part
        elif scale and (current is not None or total):
            if current is None or (total and scale > total):
                total, current = (total + (current or 0)) * scale, None
            elif scale == 100:
                current *= scale
            else:
                total, current = total + current * scale, None
        else:
            break
        at += 1
    return at, total + (current or 0)


def _count_digit_words(words: list[str]) -> int:
    """Count the words at the start that are single digits."""
    count = 0
    while count < len(words) and _UNITS.get(words[count], 10) < 10:
        count += 1
    return count
