"""RLVR on written questions, with QwenLong-L1's curriculum and short-to-long self-distillation."""
