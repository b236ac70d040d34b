"""`troth demo`: a real network on one machine, watched from the ledger and judged by an independent checker.

Every role is its own process with its own key and directory; they meet on real sockets and a real chain. `plan` decides
the numbers, `launch` starts and stops processes, `ends` measures, settles and claims, `watch` shows progress, `curve` keeps
the rewards of each step, `check` reads only the chain and public blobs and decides whether the run is good. `smollm` is the
plan with a pretrained model.
"""

from troth.demo.main import run_demo, run_plan

__all__ = ["run_demo", "run_plan"]
