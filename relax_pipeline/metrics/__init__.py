"""What a run measures: rows on disk, curves, and the report."""
