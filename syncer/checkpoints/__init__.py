"""A run's state in a folder, on a disk or in an object store: saved fragment by fragment, and back on an empty run."""
