"""The page of a run: its model, what is said of it in one sentence, and the files that a browser gets."""
