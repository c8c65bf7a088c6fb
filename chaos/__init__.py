"""The production code under simulated faults: a seeded world in virtual time."""
