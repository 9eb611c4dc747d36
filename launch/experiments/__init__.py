"""Tables and figures of the papers: published numbers, the runs that repeat them, and a printer."""
