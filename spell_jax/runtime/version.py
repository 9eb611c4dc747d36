"""The version of the package, which setup.py reads, too."""

VERSION = "0.1.0"
