"""Tools of the documentation, which import every package and are imported by tests only.

measurements: measured numbers in pages (python -m docs.tools.measurements).
commands: command lines of the repository, read from source.
reference: reference pages, made from dataclasses, docstrings and flags.
site: hooks of mkdocs (`make docs`).
equations: TeX of the pages to MathML of the site.
repository: public address of the repository, for links of the site.
"""
