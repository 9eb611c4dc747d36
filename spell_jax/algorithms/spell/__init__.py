"""SPELL (arXiv 2509.23863): one policy writes questions, answers them and judges the answers.

algorithm.py composes the parts: questioner.py, answering.py and groups.py. RLVR and the preference
algorithms compose the same parts.
"""
