"""The syncer: holds the global fragments, gathers deltas in windows, merges and publishes. Imports no torch."""
