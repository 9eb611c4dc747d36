"""Tests of boilerplate: which lines count, that copies rank as a reader would, linear time."""

import itertools
import time

import pytest

from data_pipeline.boilerplate import LONGEST_LINE, boilerplate_length, worth

NAMES = itertools.islice(itertools.permutations("abcdefg", 3), 20)
ARTICLE = "\n\n".join(f"The river {'-'.join(name)} rose by many feet in May." for name in NAMES)


@pytest.mark.parametrize(
    "line",
    [
        "© 2024 The Daily River",
        "Copyright The Daily River. All rights reserved.",
        "Printed from www.example.org on 3 May",
        "Page 3 of 12",
        "We use cookies to improve this site.",
        "Subscribe to our newsletter",
        "Share this",
        "  Skip to content",
    ],
)
def test_line_with_a_phrase_is_boilerplate(line: str) -> None:
    assert boilerplate_length(f"A sentence.\n{line}\nAnother sentence.") == len(line.strip())


@pytest.mark.parametrize(
    "line",
    [
        "The committee will share its findings, and log the inputs.",
        "Chapter 3",
        "The homepage 3 weeks later",
        "The jar of cookies stood where the copyright lawyer had left it. " * 3,
    ],
)
def test_line_of_content_is_not_boilerplate(line: str) -> None:
    assert boilerplate_length(f"A sentence.\n{line}\nAnother sentence.") == 0


def test_running_header_is_boilerplate_on_all_pages() -> None:
    headers = [f"Annual report {year}" for year in (2023, 2024)]
    assert boilerplate_length(f"{headers[0]}\none\n{headers[1]}\ntwo") == sum(map(len, headers))
    assert boilerplate_length(f"{headers[0]}\none\ntwo") == 0


def test_numbers_table_rows_and_long_lines_may_repeat() -> None:
    rows = "| 2023 | 1 |\n| 2024 | 2 |\n17\n18\n---\n---\n"
    assert boilerplate_length(rows + 2 * ("word " * LONGEST_LINE + "\n")) == 0


def test_copy_without_boilerplate_has_the_most_worth() -> None:
    """The print version and the copy that breaks off before the footer rank below the article."""
    print_version = f"The Daily River\nShare this\n{ARTICLE}\n© The Daily River. Page 1 of 1"
    truncated = print_version[: -len(ARTICLE) // 6]
    edited = ARTICLE.replace("feet", "ft")
    ranked = sorted([truncated, edited, print_version, ARTICLE], key=worth, reverse=True)
    assert ranked[0] == ARTICLE and ranked[-1] == truncated
    assert worth(ARTICLE) == len(ARTICLE)


def test_whole_report_is_worth_more_than_a_copy_that_breaks_off() -> None:
    """Lines with a number inside are content, though they differ by this number alone."""
    lines = [f"Q{n} revenue was {n} million" for n in range(1, 40)]
    report = "\n".join([*lines, "The year ended in December."])
    assert boilerplate_length(report) == 0
    assert worth(report) > worth("\n".join(lines[:33]))


def test_time_is_linear_in_the_length() -> None:
    def seconds(text: str) -> float:
        start = time.thread_time()
        boilerplate_length(text)
        return time.thread_time() - start

    for unit in ("a", "print ", "share\n", "www", "1\n", "page 1"):
        assert seconds(unit * 400_000) < 20 * seconds(unit * 40_000) + 0.1
