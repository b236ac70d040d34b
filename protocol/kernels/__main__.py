"""Compile the kernels into their cache, so that no role has to: python -m protocol.kernels. Exit code 1 without numba."""

from protocol.kernels import kernels

if __name__ == "__main__":
    raise SystemExit(0 if kernels.load() else 1)
