"""The page of a run: its model, the sentence that sums up the run, and the files that a browser gets."""
