"""The syncer as a process: its start, its leases, leading and closing a run, and HTTP."""
