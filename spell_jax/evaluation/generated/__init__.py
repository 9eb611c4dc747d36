"""Generated benchmarks of any length: RULER and the needle grid, with texts that hide needles."""
