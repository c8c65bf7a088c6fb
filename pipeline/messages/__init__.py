"""What crosses the bus, as bounded types."""
