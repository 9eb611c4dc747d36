"""Logs of a run: metrics, a progress line, TensorBoard and Weights & Biases."""
