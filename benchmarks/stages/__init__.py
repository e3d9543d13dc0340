"""What benchmarks/pipeline.py measures, one file for each of its tables."""
