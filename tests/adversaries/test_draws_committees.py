"""V3: committees are drawn by the protocol's own rule as often as chance says, and no account can be ground into one.

All "random" inputs are counters through SHA-256, so every figure here is the same on every machine.
"""

from __future__ import annotations

from collections import Counter
from math import comb, sqrt

import pytest

from protocol.codec import tagged_hash
from protocol.lottery import compute_committee

TASK = b"\x11" * 32
#: Standard deviations that a count may be off: 1 in 10^7 for one count.
SIGMAS = 5.3


def make_hash(*words):
    return tagged_hash("test-draw", *(str(word).encode() for word in words))


def assert_count(seen, expected, trials):
    """A binomial count is as it should be."""
    off = abs(seen - expected * trials) / sqrt(trials * expected * (1 - expected))
    assert off < SIGMAS, f"{seen} of {trials}, expected {expected * trials:.0f}: {off:.1f} standard deviations"


def test_v3_colluders_are_drawn_as_often_as_chance_says():
    """3 colluders of 10 verifiers (30 %), committees of 3, 10^5 beacons, against the hypergeometric distribution; a round
    needs 2 of 3, so colluders decide one in 5.5 rounds: 22 of 120."""
    pool = [make_hash("verifier", number)[:20] for number in range(10)]
    colluders, trials, size = set(pool[:3]), 100_000, 3
    seen = Counter()
    for number in range(trials):
        committee = compute_committee(
            task=TASK, round_index=3, beacon=make_hash("audit", number), candidates=pool, size=size
        )
        assert len(set(committee)) == size
        seen[len(colluders.intersection(committee))] += 1
    ways = {hit: comb(3, hit) * comb(7, size - hit) / comb(10, size) for hit in range(size + 1)}
    chi = sum((seen[hit] - share * trials) ** 2 / (share * trials) for hit, share in ways.items())
    assert chi < 35.0, f"chi-square {chi:.1f}, seen {dict(seen)}"  # 1 in 10^7 at 3 degrees of freedom
    assert_count(seen[2] + seen[3], ways[2] + ways[3], trials)
    assert ways[2] + ways[3] == pytest.approx(22 / 120)


def test_v3_an_account_cannot_be_ground_into_a_later_committee():
    """A colluder picks, of 1,000 accounts, one that the known beacon would draw; the next beacon ranks it anew."""
    others, drawn = [make_hash("verifier", number)[:20] for number in range(9)], 0
    for trial in range(100):

        def seats(account, beacon):
            return compute_committee(task=TASK, round_index=3, beacon=beacon, candidates=[*others, account], size=3)

        known = make_hash("known", trial)
        accounts = (make_hash("account", trial, number)[:20] for number in range(1_000))
        best = next(account for account in accounts if account in seats(account, known))
        drawn += best in seats(best, make_hash("later", trial))
    assert_count(drawn, 3 / 10, 100)
