"""What a syncer records of its merges, and the same merges made again, to the bit."""
