"""Values that documents state, numbers and names: other ways to write them, and equal meaning."""

from __future__ import annotations

import re

from spell_jax.data.clusters import LETTERS
from spell_jax.selfplay.numbers import Number, parse_number, same_number

NUMBER = re.compile(r"\$?(?:0(?=\.)|[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d*)(?:\.\d+)?%?")


def read_number(text: str) -> Number | None:
    """Return the value of a text that is a plain number, maybe with "$" or "%", else None."""
    return parse_number(text) if NUMBER.fullmatch(text) else None


def means_the_same(left: str, right: str) -> bool:
    """Return whether two values are too close to count as different in demonstrations.

    Numbers are the same within the rule's tolerance (spec 5.3), texts if one contains the other.
    """
    first, second = read_number(left), read_number(right)
    if first is not None and second is not None:
        return same_number(first, second) or same_number(second, first)
    left, right = left.casefold(), right.casefold()
    return left in right or right in left


def other_forms(value: str) -> list[str]:
    """Return other ways to write a letter, a number or a name with the same meaning."""
    if value in LETTERS:
        return [f"({value})", f"{value}."]
    if read_number(value) is None:
        forms = [value.upper(), value.lower(), f"{value}."]
    else:
        unit = "%" if value.endswith("%") else ""
        plain = value.strip("$%").replace(",", "")
        integer, point, fraction = plain.partition(".")
        grouped = f"{int(integer):,}{point}{fraction}"
        padded = f"{plain}0" if point else f"{plain}.0"
        forms = [f"{form}{unit}" for form in (plain, grouped, padded, f"the number {plain}")]
    return [form for form in forms if form != value]
