"""The ledger: Solidity sources, committed artifacts, a local devnet, and the client of the Ledger port."""
