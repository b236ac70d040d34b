"""Bytes to many peers, verified before they are used or passed on. Knows nothing of models or ledgers."""
