"""The syncer as a process: start, leases, leading, closing, HTTP."""
