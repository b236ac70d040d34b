"""`troth demo`: a real network on one machine, watched from the ledger and judged by an independent checker.

Every role is its own process with its own key and directory; they meet on real sockets and a real chain. `plan` decides
the numbers, `launch` starts and stops processes, `watch` shows progress, `check` reads only the chain and public blobs
and decides whether the run is good.
"""

from troth.demo.main import run_demo

__all__ = ["run_demo"]
