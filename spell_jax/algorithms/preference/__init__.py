"""Preferences between answers after short and long contexts: LongPO and SoLoPO."""
