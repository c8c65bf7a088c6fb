"""Results of runs: kept in a folder, summed up in a CSV, shown as tables and pictures."""
