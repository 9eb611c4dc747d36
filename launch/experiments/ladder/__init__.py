"""The ladder: a finished study (docs/ladder.md), of configs, commands, figure and notebook."""
