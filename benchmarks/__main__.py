"""Entry point of `python -m benchmarks NAME [--options]`; commands.py lists the benchmarks."""

from benchmarks.commands import main

main()
