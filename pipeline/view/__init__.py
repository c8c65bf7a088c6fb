"""What a run looks like from outside: status, merged shares, the ledger."""
