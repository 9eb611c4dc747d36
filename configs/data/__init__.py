"""Configs of data_pipeline.build: sources and stages of a corpus."""
