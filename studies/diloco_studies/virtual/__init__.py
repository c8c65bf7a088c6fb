"""Stand-ins for tests and studies: a bus in memory, virtual time, chance from a seed."""
