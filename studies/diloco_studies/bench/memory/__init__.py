"""What a run of a size holds in memory: as it merges, saves and resumes."""
