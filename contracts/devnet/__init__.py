"""A one-process EVM chain for development: py-evm, a mempool and a fixed block tick behind JSON-RPC. No money is real here."""
