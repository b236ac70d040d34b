"""How often the judge is wrong: honest work refused over all engine pairs, and forged work accepted, attack by attack.

MODEL is a policy folder. Rollouts are really made, committed to and prefilled; `protocol.checks.validate_scored` decides.
A unit (a rollout; a group of 16; a submission of 8 groups) is accepted when nothing in it is refused with all of it audited.

    python benchmarks/roc.py run/base --environment sort --args '{"digits":4}' --tokens 6 --table
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attacks import GROUP_SIZE, Attack, World, make_attacks
from rates import GROUPS, SUBMISSION, Verdicts, bound, judge, make_spec, summarise

import environments
from protocol.presets import PROFILE_FP32
from protocol.task import Environment, ProofProfile
from troth.calibrate.alternatives import ALTERNATIVES
from troth.calibrate.files import load_profile
from troth.calibrate.measure import Made, make_rollouts, score_rollouts
from troth.calibrate.pairs import Maker, Prefill, count_rollouts, make_pairs, select_pairs


def judge_attack(world: World, attack: Attack) -> Verdicts:
    """What the judge makes of an attack, after a prefill as a verifier does it."""
    prefill = Prefill(64, "sdpa", world.profile.dtype, 1)
    observed = score_rollouts(world.folder, prefill, world.requests, attack.made, world.terms)
    return judge(make_spec(world.profile, world.max_tokens), attack.made, observed, attack.is_forged)


def measure_honest(world: World, count: int, names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Honest rollouts that are refused, by engine pair (all accepted ones, or those named).

    Args:
        count: of each pair, less of those that are slow (troth.calibrate.pairs); the world's first assignments are made.
    """
    known = [pair for pair in make_pairs(world.profile.dtype, 1, with_vllm=False) if pair.is_accepted]
    spec, found = make_spec(world.profile, world.max_tokens), []
    made_by: dict[Maker, Made] = {}
    for pair in select_pairs(known, names):
        number = count_rollouts(pair.maker, count) // GROUP_SIZE * GROUP_SIZE
        requests = world.requests[:number]
        if pair.maker not in made_by:
            made_by[pair.maker] = make_rollouts(world.folder, pair.maker, requests, world.terms)
        made = made_by[pair.maker]
        observed = score_rollouts(world.folder, pair.prefill, requests, made, world.terms)
        verdicts = judge(spec, made, observed, np.ones(number, dtype=np.bool_))
        refused = int((~verdicts.rollouts).sum())
        found.append(
            {
                "pair": pair.name,
                "n": number,
                "refused": refused,
                "upper": round(bound(refused, number), 6),
                "submissions": len(verdicts.submissions),
                "submissions_refused": int((~verdicts.submissions).sum()),
                "nats_per_group": round(float(verdicts.group_nats.mean()) / 256, 3),
            }
        )
        tell(f"honest {pair.name}: {refused} of {number} refused")
    return found


def tell(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def measure(options: argparse.Namespace, profile: ProofProfile) -> dict[str, Any]:
    """Everything, as one JSON object."""
    environment = None
    if options.environment:
        spec = Environment(
            options.environment, options.args, environments.content_hash(options.environment, options.args)
        )
        environment = environments.load(spec, [options.model])
    count = options.rollouts or options.honest
    world = World(options.model, profile, environment, count, options.tokens, options.temperature, options.seed)
    honest = measure_honest(world, options.honest) if options.honest else []
    attacks = []
    with tempfile.TemporaryDirectory(prefix="troth-roc-") as work:
        names = options.alternatives.split(",") if options.alternatives else None
        for attack in make_attacks(world, Path(work), names) if options.rollouts else ():
            attacks.append(
                {"row": attack.row, "name": attack.name, **summarise(judge_attack(world, attack), world.seed)}
            )
            tell(f"{attack.row} {attack.name}: {attacks[-1]['rollouts']}, submissions {attacks[-1]['submissions']}")
    total, refused = sum(one["n"] for one in honest), sum(one["refused"] for one in honest)
    return {
        "profile": profile.name,
        "dtype": profile.dtype,
        "group_size": GROUP_SIZE,
        "groups": GROUPS,
        "tokens_mean": round(float(np.mean([len(line) for line in world.honest.completions])), 2),
        "honest": honest,
        "honest_total": {"n": total, "refused": refused, "upper": round(bound(refused, total), 6) if total else None},
        "attacks": attacks,
    }


def format_table(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    lines = []
    if result["honest"]:
        lines += ["| engine pair | refused rollouts | refused submissions | nats per group |", "|---|---|---|---|"]
    for one in result["honest"]:
        submissions = f"{one['submissions_refused']} of {one['submissions']:,}"
        lines.append(f"| {one['pair']} | {one['refused']} of {one['n']:,} | {submissions} | {one['nats_per_group']} |")
    total = result["honest_total"]
    if result["honest"]:
        lines.append(f"| **all rows** | **{total['refused']} of {total['n']:,}** | | |")
    head = "| row | attack | accepted rollouts | accepted groups | accepted submissions | refused after rollouts | "
    lines += ["", head + "nats per group | rounds at p = 1: refused, alarm | at p = 0.05 |", "|---" * 9 + "|"]
    for one in result["attacks"]:
        cells = [one["row"], one["name"]]
        cells += [_accepted(one[unit]) for unit in ("rollouts", "groups", "submissions")]
        cells += ["never" if one["rollouts_to_refusal"] is None else f"{one['rollouts_to_refusal']:,}"]
        cells += [f"{one['nats_per_group']:+,.2f}"]
        for key in ("rounds_at_1", "rounds_at_p"):
            cells.append(", ".join("never" if value is None else f"{value:,}" for value in one[key].values()))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _share(value: float) -> str:
    return f"{100 * value:.3g} %"


def _accepted(one: dict[str, Any]) -> str:
    return f"{one['accepted']:,} of {one['n']:,} (< {_share(one['upper'])})" if one["n"] else "none forged"


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="policy folder")
    parser.add_argument("--rollouts", type=int, default=3_200, help="of every attack, in whole submissions; 0 for none")
    parser.add_argument("--honest", type=int, default=4_608, help="of every engine pair, likewise")
    parser.add_argument("--alternatives", default="", help=f"other policies, all when empty: {','.join(ALTERNATIVES)}")
    parser.add_argument("--environment", default="", help="of the prompts; random tokens when empty")
    parser.add_argument("--args", default="{}", help="its arguments, a JSON object")
    parser.add_argument("--tokens", type=int, default=64, help="longest completion")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--profile", default="", help="a shipped profile or a file; the float32 preset when empty")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON (always, unless --table)")
    parser.add_argument("--table", action="store_true", help="print Markdown tables instead")
    options = parser.parse_args(arguments)
    if not options.model.is_dir():
        parser.error(f"{options.model} is no policy folder")
    options.rollouts, options.honest = (
        -(-value // SUBMISSION) * SUBMISSION for value in (options.rollouts, options.honest)
    )
    if min(options.rollouts, options.honest) < 0 or not options.rollouts + options.honest:
        parser.error("--rollouts and --honest must not be negative, nor both 0")
    if options.rollouts:
        options.rollouts = max(options.rollouts, options.honest)
    return options


def main() -> None:
    """Measure and print."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = parse_options()
    profile = load_profile(options.profile, Path()) if options.profile else PROFILE_FP32
    result = measure(options, profile)
    result = {"command": " ".join(["python benchmarks/roc.py", *sys.argv[1:]]), **result}
    print(format_table(result) if options.table else json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
