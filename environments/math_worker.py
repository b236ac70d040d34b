"""The process in which math-verify runs: one request a line, one reply a line. environments.math_answer starts it.

sympy can hang or eat memory, and math-verify's own time limit is an alarm signal that takes a slow machine for a wrong answer;
so it runs here, without that limit, and whoever asks ends the process. Requests are `{"gold": text}` (can it be parsed?) and
`{"gold": text, "answer": text}` (is it right?); replies `{"right": bool}`, or `{"error": text}` when nothing follows from it.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
from typing import Any

#: Address space, bytes. Texts were screened before they come here, so nothing honest needs a tenth of it.
MEMORY_BYTES_MAX = 2 << 30


def _parse(text: str) -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    configs = [LatexExtractionConfig(), ExprExtractionConfig()]
    found: list[Any] = parse(text, configs, fallback_mode="no_fallback", parsing_timeout=None)
    return found


def answer(request: dict[str, str]) -> dict[str, object]:
    """Reply to one request; an error of the machine rather than of the text is reported as such."""
    from math_verify import verify

    try:
        gold = _parse(request["gold"])
        if "answer" not in request or not gold:
            return {"right": bool(gold)}
        target = _parse(request["answer"])
        return {"right": bool(target) and bool(verify(gold, target, timeout_seconds=None, raise_on_error=True))}
    except (MemoryError, OSError, RecursionError, ImportError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    except Exception:  # documented by math-verify: two expressions that cannot be compared are not equal
        return {"right": False}


def main() -> None:
    """Serve stdin until it ends."""
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    replies, sys.stdout = sys.stdout, sys.stderr  # a package that prints must not speak for us
    known = answer({"gold": "$1$", "answer": "$1$"})  # imports, before the first request is timed
    if known != {"right": True}:
        sys.exit(
            f"math-verify does not work here: 1 = 1 gives {known}"
        )  # and no answer is taken for wrong because of it
    replies.write('{"ready": true}\n')
    replies.flush()
    for line in sys.stdin:
        replies.write(json.dumps(answer(json.loads(line))) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
