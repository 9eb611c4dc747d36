"""Test that every file of reference cases is read, or that its README states the reason."""

import pathlib
import re

TESTS = pathlib.Path(__file__).parent
CASES = TESTS / "reference_cases"


def test_each_reference_file_is_read_or_excused():
    files = {path.stem for path in CASES.glob("*.json")}
    sources = "".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    read = {name for name in files if re.search(rf'"{name}(\.json)?"', sources)}
    _, _, unread = (CASES / "README.md").read_text().partition("Not read by any test")
    excused = {name for name in files if re.search(rf"\b{name}\b", unread)}
    assert files - read - excused == set()
    assert read & excused == set()
