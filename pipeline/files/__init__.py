"""What is written to disk: JSON without surprises, lines that are appended, digests of files."""
