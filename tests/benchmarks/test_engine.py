"""Test of the benchmark of inputs, on Beam's local runner and at a small size."""

from __future__ import annotations

import pytest

from benchmarks.__main__ import run


@pytest.mark.slow
def test_inputs_benchmark_reads_all_documents() -> None:
    line = run(["inputs", "--files=30", "--gigabytes=0.06", "--master="])
    assert (line["files_documents"], line["files_tenth_documents"]) == (30, 3)
    assert (line["large_documents"], line["large_tenth_documents"]) == (2000, 1000)
    assert line["large_driver_bytes"] > 0 and line["large_s"] > 0
