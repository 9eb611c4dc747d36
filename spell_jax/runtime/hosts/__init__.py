"""The processes of a run: how they meet, exchange host data, and end together."""
