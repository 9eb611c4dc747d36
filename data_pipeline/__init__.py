"""Apache Beam pipeline from raw text to clusters of documents: python -m data_pipeline.build."""
