"""Upload and download of payloads over the bus, and the formats of globals there."""
