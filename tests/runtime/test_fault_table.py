"""Test that the table of faults in docs/launching.md and the tests of its cells agree."""

from __future__ import annotations

import re

from tests.paths import ROOT
from tests.slow.test_cut_off import CELLS, FIRST, cell_id


def test_each_cell_of_the_fault_table_is_a_test_and_each_test_a_cell() -> None:
    text = (ROOT / "docs" / "launching.md").read_text()
    table_cells = re.findall(r"(\*\*)?`([a-z_]+-[a-z]+-\d(?:-first)?)`", text)
    assert sorted(name for _, name in table_cells) == sorted(map(cell_id, CELLS))
    assert {name for bold, name in table_cells if bold} == set(map(cell_id, FIRST))
