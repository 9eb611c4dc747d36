"""EAPO (arXiv 2601.10306): rewards for the evidence of an answer, by a co-evolving reward model."""
