"""What methods talk to: the federation, its sites, exchanges, messages and the ledger."""
