"""Messages that cross the bus, as bounded types."""
