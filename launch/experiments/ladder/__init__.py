"""The ladder: a finished study (docs/ladder.md).

Its world, rows and evaluation are functions that its configs name.
"""
