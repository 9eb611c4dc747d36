"""Parse and compare numbers in model text without evaluating it (spec section 5.3).

A precedence parser computes simple expressions and bounds every intermediate value. Longer inputs
than `MAX_CHARACTERS` are rejected, so the time is bounded.
"""

import math
import re
from collections.abc import Sequence

Number = bool | int | float

MAX_CHARACTERS = 100  # enough for any figure; also bounds the depth of brackets
LARGEST = 1e100  # larger values are rejected, so scaling cannot overflow
TOLERANCE = 0.0015  # relative to the reference, as in the paper's public code (spec 5.3)
SCALES = (1e2, 1e3, 1e6, 1e9)  # percent, thousand, million, billion: one side may omit them

# Commas only where they separate thousands: "1,23" is no number.
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_LITERAL = rf"(?:{_DIGITS})(?:[eE][+-]?[0-9]+)?"
_TOKEN = re.compile(rf"\s*(?:({_LITERAL})|(\*\*|[-+*/^()x×]))")
_CURRENCY = re.compile(r"[$€£¥]|\b(?:million|billion|thousand|USD?|RMB)\b", re.IGNORECASE)
_NEGATIVE = re.compile(r"\b(?:minus|negative)\s+", re.IGNORECASE)
_UNITS = re.compile(r"(?:[^\s\d]+\s+)?(\S.*?)(?:\s+[^\s\d]+)?", re.DOTALL)
_AFFIXES = re.compile(rf"[^\d.+\-(]{{0,2}}([+-]?(?:{_LITERAL}))[^\d.)]{{0,2}}")
_TRUTH = {"yes": True, "true": True, "no": False, "false": False}
# Strength of each operator: products bind tighter than sums, powers tighter than products.
_BINDING = {"+": 1, "-": 1, "*": 2, "x": 2, "×": 2, "/": 2, "^": 3, "**": 3}


def parse_number(text: str) -> Number | None:
    """Parse the value of `text`; None if it is not a single number.

    Accepts well-placed thousands commas, exponents, simple arithmetic (+ - * / ^ and brackets),
    "yes"/"no"/"true"/"false" as booleans, and one unit word or up to two other characters on either
    side. Percent signs and scale words are dropped, not applied: "12%" is 12 and "3.4 billion" is
    3.4. `same_number` compensates for this.
    """
    text = text.strip()
    # Never eval(), as in the public code: text of a model is data.
    if len(text) > MAX_CHARACTERS or any(c.isnumeric() and not c.isdecimal() for c in text):
        return None  # 5² or 5½: the last character is part of the number, but not supported
    # "x = 5" and "1/3 ≈ 0.333" state what follows the last sign.
    text = re.split("[=≈]", _CURRENCY.sub("", text))[-1]
    text = re.sub("[%°`]", "", text).strip()
    if text.lower() in _TRUTH:
        return _TRUTH[text.lower()]
    if stated := re.search(r"\b(True|False)\b", text):
        return stated[1] == "True"
    text = re.sub("approximately", "", text, flags=re.IGNORECASE).partition(" or ")[0]
    text = _NEGATIVE.sub("-", text.replace("\N{MINUS SIGN}", "-")).strip()
    # The text itself first: "2 x 3" is a product, not 2 with a unit.
    undressed = (pattern.fullmatch(text) for pattern in (_UNITS, _AFFIXES))
    readings = [text, *(match[1] for match in undressed if match)]
    return next((value for value in map(calculate, readings) if value is not None), None)


def same_number(prediction: Number, reference: Number, scales: Sequence[float] = SCALES) -> bool:
    """Return whether `prediction` agrees with `reference` (spec section 5.3, with signs compared).

    True if the values agree within 0.15 % of the reference, at once or after the smaller value is
    multiplied by one of `scales` (only one side wrote out a percent sign or a scale word). Booleans
    must be equal. NaN, infinities and values above `LARGEST` never agree with anything.
    """
    if isinstance(prediction, bool) or isinstance(reference, bool):
        return prediction == reference
    if not (abs(prediction) <= LARGEST and abs(reference) <= LARGEST):
        return False
    # The public code calls -5 and 5 equal. A loss is not a profit, so signs count here.
    if (prediction < 0) != (reference < 0):
        return False
    small, large = sorted((abs(float(prediction)), abs(float(reference))))
    return _close(abs(prediction), abs(reference)) or any(
        _close(large, small * scale) for scale in scales
    )


def number_text(value: int | float) -> str:
    """Format `value` as a reference answer: Python's text, with integers below 1e21 in digits."""
    if isinstance(value, float) and value.is_integer() and 1e16 <= abs(value) < 1e21:
        return str(int(value))
    return str(value)


def _close(value: float, target: float) -> bool:
    margin = TOLERANCE * target
    return target - margin <= value <= target + margin


def calculate(text: str) -> int | float | None:
    """Compute an arithmetic expression (+ - * x / ^ ** and brackets); None for other text."""
    if len(text) > MAX_CHARACTERS:
        return None
    tokens: list[int | float | str] = []
    position = 0
    try:
        while position < len(text):
            match = _TOKEN.match(text, position)
            if not match:
                return None
            tokens.append(match[2] or _parse_literal(match[1]))
            position = match.end()
        tokens.reverse()  # the next token is last, so that popping it is O(1)
        value = _parse_expression(tokens, 0)
    except (ValueError, ArithmeticError, IndexError):
        return None
    return None if tokens else value


def _parse_literal(digits: str) -> int | float:
    digits = digits.replace(",", "")
    return _check_bounds(int(digits) if digits.isdigit() else float(digits))


def _parse_expression(tokens: list[int | float | str], binding: int) -> int | float:
    """Pop from `tokens` (reversed) an expression of operators that bind tighter than `binding`."""
    # Precedence climbing: an operand, then operators while they are strong enough.
    value = _parse_operand(tokens)
    while tokens:
        operator = tokens[-1]
        if not isinstance(operator, str):
            raise ValueError("two numbers without an operator")
        strength = _BINDING.get(operator, 0)
        if strength <= binding:
            break
        tokens.pop()
        is_power = strength == 3  # the only right-associative operator
        right = _parse_expression(tokens, strength - 1 if is_power else strength)
        value = _check_bounds(_apply(operator, value, right))
    return value


def _parse_operand(tokens: list[int | float | str]) -> int | float:
    token = tokens.pop()
    if not isinstance(token, str):
        return token
    if token == "(":
        value = _parse_expression(tokens, 0)
        if tokens.pop() != ")":
            raise ValueError("bracket not closed")
        return value
    if token in "+-":
        # A sign binds tighter than a product, but looser than a power: -2^2 is -4.
        value = _parse_expression(tokens, 2)
        return -value if token == "-" else value
    raise ValueError(f"{token!r} where a number should be")


def _apply(operator: str, left: int | float, right: int | float) -> int | float | complex:
    match operator:
        case "+":
            return left + right
        case "-":
            return left - right
        case "/":
            return left / right
        case "*" | "x" | "×":
            return left * right
    # Before the power is computed, because 9**9**9 would take all memory.
    if abs(right) > 400:
        raise OverflowError("exponent too large")
    return left**right


def _check_bounds(value: int | float | complex) -> int | float:
    if isinstance(value, complex) or math.isnan(value) or abs(value) > LARGEST:
        raise OverflowError("not a real number of a usable size")
    return value
