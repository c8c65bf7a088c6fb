"""What the core asks of the bus (small protocols), keys, access rights, TLS; `redis_streams`, of parts in `redis`."""
