"""Real parts made small for tests: an in-memory ledger, blob store and policy store."""
