"""What the core asks of the bus (small protocols), Redis' adapter with its Lua scripts, keys, access rights, TLS."""
