"""Published benchmarks: strict readers of their files, prompts, and scoring of answers."""
