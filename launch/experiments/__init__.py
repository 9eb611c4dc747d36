"""Studies: the papers' tables and figures, with the runs that repeat them, and finished studies.

A finished study is a folder with its configs, world, rows, evaluation, commands, figure and
notebook. The package `spell_jax` knows none of them.
"""
