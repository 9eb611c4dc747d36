"""RLVR on given or written questions, with QwenLong-L1's curriculum and self-distillation.

Each is a function that composes a StaticAlgorithm of a question set, answers and groups.
"""
