"""Read-only views of a run: status, merged shares, the token ledger, and the page."""
