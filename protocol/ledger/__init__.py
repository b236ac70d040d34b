"""The ledger as the rules see it: events it emits, calls it takes, the replica built from events, and settlement."""
