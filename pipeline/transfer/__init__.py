"""Payloads on their way to the bus and from it, and the formats in which globals lie there."""
