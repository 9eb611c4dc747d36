"""Document reconstruction (arXiv 2602.08237): paragraphs go back to where they were."""
