"""Mean reward of policies on held-out prompts: `python -m troth.demo.evaluate ENTRY ARGS FIRST LAST`, JSON on stdout.

Held-out prompts are those that no round ever assigns. Noise is counter-based with the same keys for every policy, so the
comparison is paired.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import environments
from protocol.task import Environment
from trainer.evaluate import evaluate_policy


def main(entry: str, args: str, max_tokens: int, first: Path, last: Path) -> None:
    """Print {"reward_first", "reward_last", "prompts"}."""
    spec = Environment(entry, args, environments.content_hash(entry, args))
    held_out = environments.load(spec).held_out()  # type: ignore[attr-defined]
    indices = range(held_out.num_prompts)
    rewards = [
        evaluate_policy(
            folder, held_out, indices, num_samples=2, temperature=1.0, max_tokens=max_tokens, stop_tokens=[1]
        ).reward_mean
        for folder in (first, last)
    ]
    print(json.dumps({"reward_first": rewards[0], "reward_last": rewards[1], "prompts": len(indices)}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5]))
