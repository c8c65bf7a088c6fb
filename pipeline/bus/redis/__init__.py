"""The parts of the bus on Redis: the way to the server, and a class for each protocol. `redis_streams` is their sum."""
