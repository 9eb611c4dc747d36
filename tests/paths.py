"""Folders of the checkout that tests read."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REFERENCE_CASES = ROOT / "tests" / "reference_cases"
