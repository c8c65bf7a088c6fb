"""The parts of the bus on Redis: the connection, and a class for each protocol. `redis_streams` combines them."""
