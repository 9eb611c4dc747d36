"""From raw text to clusters of documents, on Apache Beam: python -m data_pipeline.build."""
