"""Redis servers that fail over, as real processes, on loopback or as machines that can be cut off."""
