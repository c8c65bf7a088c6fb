"""The bus between all parties: its protocols (`ports`), key names, access rights, and the Redis adapter (`redis`)."""
