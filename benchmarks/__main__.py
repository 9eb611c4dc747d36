"""python -m benchmarks NAME [--options]: see commands.py."""

from benchmarks.commands import main

main()
