"""Markdown tables of profile files, so that what is printed about a profile is what its file holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from protocol.errors import ConfigError
from protocol.task import ProofProfile
from troth.calibrate.files import ProfileFile
from troth.calibrate.statistics import QUANTILES

#: Where the largest value stands in a list of quantiles, and where 99.9 % does.
_MAX, _Q999 = len(QUANTILES) - 1, QUANTILES.index(99.9)


def format_tables(files: Sequence[ProfileFile]) -> str:
    """Limits of all files in one table, then honest pairs and alternatives of each.

    Raises:
        ConfigError: for a file without a complete record.
    """
    try:
        parts = [_format_limits(files)]
        for file in files:
            parts += [f"### {file.profile.name}", _describe(file), _format_pairs(file), _format_alternatives(file)]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(
            f"a profile file has no complete [measured] record ({error!r}): tables need what calibrate wrote"
        ) from None
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def _format_limits(files: Sequence[ProfileFile]) -> str:
    fields = [field for field in ProofProfile.__struct_fields__ if field != "name"]
    head = ["", *(file.profile.name for file in files)]
    rows = [[field, *(getattr(file.profile, field) for file in files)] for field in fields]
    return _table(head, rows)


def _describe(file: ProfileFile) -> str:
    measured = file.measured
    model, chosen = measured["model"], measured["chosen"]
    tuned = [f"{what} bet: {chosen[f'{what}_bet_for'] or 'none found, tenfold null'}" for what in ("share", "ties")]
    return (
        f"{model['family']}, {model['parameters']:,} parameters, hidden size {model['hidden']}, {model['layers']} layers, "
        f"vocabulary {model['vocab']:,}, policy `{model['policy'][:16]}`; {measured['rows']:,} rollouts over the accepted "
        f"pairs, {measured['tokens']:,} sampled tokens. Tuned for: {'; '.join(tuned)}. Command:\n\n"
        f"```\n{measured['command']}\n```"
    )


def _format_pairs(file: ProfileFile) -> str:
    head = ["pair", "N", "tokens", "share, mean", "share 99.9 %", "share, max", "mismatches, max", "mantissa mean, max"]
    head += ["median, max", "missed", "misses of a rollout, max", "gap, max"]
    rows = []
    for pair in file.measured["pairs"]:
        name = pair["name"] if pair["accepted"] else f"{pair['name']} (not accepted)"
        row = [name, f"{pair['rollouts']:,}", f"{pair['tokens']:,}", f"{pair['share_average']:.6f}"]
        row += [f"{pair['share'][_Q999]:.4f}", f"{pair['share'][_MAX]:.4f}", f"{pair['mismatches'][_MAX]:.0f}"]
        row += [f"{pair['mantissa_mean'][_MAX]:.3f}", f"{pair['mantissa_median'][_MAX]:.0f}", pair["missed_tokens"]]
        rows.append([*row, f"{pair['misses'][_MAX]:.0f}", f"{pair['gap'][_MAX]:.2g}"])
    return _table(head, rows)


def _format_alternatives(file: ProfileFile) -> str:
    head = ["alternative", "N", "share, mean", "missed tokens", "refused alone", "by activations", "by replay"]
    head += ["AUC share", "AUC mantissa", "AUC misses", "audited rollouts to the alarm"]
    rows = []
    for one in file.measured["alternatives"]:
        row = [one["name"], one["rollouts"], f"{one['share_average']:.4f}", f"{100 * one['missed_share']:.2f} %"]
        row += [f"{100 * one[field]:.1f} %" for field in ("refused", "refused_activations", "refused_replay")]
        row += [f"{one[field]:.3f}" for field in ("auc_share", "auc_mantissa", "auc_misses")]
        rows.append([*row, one.get("rollouts_to_alarm", "never")])
    return _table(head, rows)
