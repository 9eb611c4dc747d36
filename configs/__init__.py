"""Configs: short changes of the defaults.

A module has `get_config()` for the flag --config (configs/NAME.py, or configs/NAME.py:CHOICE).
Installed packages have this folder as spell_jax/configs.

Must not import: anything but `spell_jax` and `configs`.
"""
