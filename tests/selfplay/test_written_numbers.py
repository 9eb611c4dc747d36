"""Tests of numbers as people write them: separators, signs, scales, words, LaTeX and refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spell_jax.selfplay.numbers import LARGEST, parse_number
from spell_jax.selfplay.written_numbers import read_number

READ = {
    # Separators
    "1,234,567.89": "1234567.89",
    "12,34,567": "1234567",
    "1.234.567": "1234567",
    "1.234.567,8": "1234567.8",
    "1.234,56": "1234.56",
    "1 234,56": "1234.56",
    "1\u202f234\u202f567": "1234567",
    "1'000'000": "1000000",
    "1’234.5": "1234.5",
    "1_000": "1000",
    "1{,}000": "1000",
    r"1\,000": "1000",
    "1.234": "1.234",
    "1.50": "1.50",
    ".5": "0.5",
    "5.": "5",
    # Signs
    "−5": "-5",
    "–5": "-5",
    "-$5": "-5",
    "$-5": "-5",
    "+5": "5",
    "minus five": "-5",
    "negative 3.5%": "-3.5",
    "(2,790)": "-2790",
    "($1.2 million)": "-1200000",
    "$(1.2) million": "-1200000",
    "(12.5%)": "-12.5",
    "-(5)": "-5",
    # Currencies, units and scales
    "US$ 5": "5",
    "EUR 1.000,50": "1000.50",
    "100 USD": "100",
    "Rs. 500": "500",
    "₹5": "5",
    "5 million dollars": "5000000",
    "$5k": "5000",
    "$5 M": "5000000",
    "€4bn": "4000000000",
    "4.2B": "4200000000",
    "£1.1tn": "1100000000000",
    "3.3 million": "3300000",
    "3.5 (in millions)": "3500000",
    "$3.5 in thousands": "3500",
    "5亿": "500000000",
    "5百万": "5000000",
    "5 Mrd. EUR": "5000000000",
    "2 dozen": "24",
    "12 years": "12",
    "5kg": "5",
    "12.5 percent": "12.5",
    "12.5 per cent": "12.5",
    r"12\%": "12",
    "3rd": "3",
    # Words around it
    "about 12.5%.": "12.5",
    "approximately $7": "7",
    "nearly $5 billion": "5000000000",
    "roughly five": "5",
    "~5": "5",
    "≈ 5": "5",
    "x = 12": "12",
    "5 + 7 = 12": "12",
    "22/7 ≈ 3.14": "3.14",
    "**5**": "5",
    "`5`": "5",
    "“5”": "5",
    # Fractions, powers and products
    "1/2": "0.5",
    "½": "0.5",
    "2½": "2.5",
    "2 1/2": "2.5",
    r"\frac{1}{2}": "0.5",
    r"-\dfrac12": "-0.5",
    r"1\frac{1}{2}": "1.5",
    r"\sqrt{16}": "4",
    "10⁶": "1000000",
    "10^{-3}": "0.001",
    r"3.2 \times 10^{-3}": "0.0032",
    "3 × 10^6": "3000000",
    "1e5": "1e5",
    "2*(3+4)": "14",
    # Other digits, and characters without width
    "１２．５％": "12.5",
    "٣٤": "34",
    "\u200b5\u200e": "5",
    r"\text{12 million}": "12000000",
    r"\mathrm{5}\,\text{km}": "5",
    "$12$": "12",
    r"\(12\)": "12",
    # Words
    "zero": "0",
    "twenty-one": "21",
    "one hundred and five": "105",
    "twelve hundred": "1200",
    "five million": "5000000",
    "one thousand, two hundred and thirty-four": "1234",
    "three point one four million": "3140000",
    "two and a half million": "2500000",
    "half a million": "500000",
    "a quarter of a million": "250000",
    "three quarters of a billion": "750000000",
    "a dozen": "12",
    "two thousand million": "2000000000",
    "three hundred thousand million": "300000000000",
    "five hundred and two million": "502000000",
    "5 hundred": "500",
    "3 dozen": "36",
    "2 lakh": "200000",
    "2 crore": "20000000",
    "5 trillion": "5000000000000",
    "5 quadrillion": "5000000000000000",
    "5mm dollars": "5",
    "$5mm": "5000000",
    "€5 mio": "5000000",
    "5 mln": "5000000",
    "5 tn": "5000000000000",
    "5千": "5000",
    "5億": "500000000",
    "three quarters": "0.75",
    # Truths
    "Yes.": "yes",
    "FALSE": "false",
}
REFUSED = [
    "10-12", "10–12", "10 to 12", "5 or 6", "five or six", "between 5 and 6", "5~6", "$5-6 million",
    "2024-03-01", "12/31/2019", "3/2020", "2019/20", "5 March 2020", "March 5, 2020",
    "5th of March", "5:30", "5 pm", "1.2.3", "192.168.0.1", "555-1234", "(555) 123-4567", "1,23",
    "5 6", "12, 13",
    "5 ± 1", "more than 5", "at least 5", ">5", "a handful", "N/A", "unknown", "five six", "--5",
    "2 hours 30 minutes", "5 feet 10 inches", "1e400", "(5", "one of the three", "①", "", "-", "$",
    "5A7", "0x1F", r"0.\overline{3}",
    "5 or maybe 6", "5, or possibly 6", "5; 6", "5 | 6", "5 → 7", "5 -> 7", "~~5~~ 7",
    "5. Wait, no, 7", "5. Hmm, actually it's $7",
    "1e-999 million", "1900-1901", "1900/01", "2099-2100",
]  # fmt: skip


@pytest.mark.parametrize(("text", "digits"), READ.items(), ids=map(ascii, READ))
def test_number_is_read(text, digits):
    assert read_number(text) == digits
    assert read_number(digits) == digits
    assert parse_number(digits) is not None


@pytest.mark.parametrize("text", REFUSED, ids=ascii)
def test_what_is_no_single_number_is_refused(text):
    assert not read_number(text)
    assert not read_number(text, alone=False)


@pytest.mark.parametrize(
    ("text", "digits"),
    [
        ("5. Wait, no", "5"),
        ("0.05, or 5%", "0.05"),
        ("5; the table shows 6 more", "5"),
        ("5. No doubt remains", "5"),
        ("12, as Table 3 says", "12"),
        ("12 (twelve)", "12"),
        ("$12.5 million, up from $10 million", "12500000"),
        ("12.5% of the 300 rows", "12.5"),
    ],
)
def test_sentence_may_go_on_after_a_number(text, digits):
    assert read_number(text, alone=False) == digits


@given(st.integers(-(10**20), 10**20), st.sampled_from(["{:,}", "{}", "${:,}", "{:,}."]))
def test_written_integers_are_read_back(value, form):
    assert read_number(form.format(value)) == str(value)


@given(st.text() | st.text("0123456789.,'- $%()/^x*emkM=~½²", max_size=60), st.booleans())
def test_any_text_gives_a_bounded_number_or_none(text, alone):
    digits = read_number(text, alone)
    if digits:
        value = parse_number(digits)
        assert value is not None and abs(value) <= LARGEST
        assert digits in ("yes", "no", "true", "false") or read_number(digits) == digits
