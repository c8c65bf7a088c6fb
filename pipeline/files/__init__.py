"""Files on disk: strict JSON, appending, atomic replacement, safetensors and digests."""
