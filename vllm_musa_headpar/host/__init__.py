"""What is patched in the serving software, and the ledger that keeps account of it."""
