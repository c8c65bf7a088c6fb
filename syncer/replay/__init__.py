"""Recordings of a syncer's merges, and their replay, bit for bit."""
