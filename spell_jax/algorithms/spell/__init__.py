"""SPELL (arXiv 2509.23863): one policy writes questions, answers them and judges the answers."""
