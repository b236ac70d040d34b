"""C6: what is audited cannot be ground, and comes out as often as it should, by the protocol's own draws.

All "random" inputs are counters through SHA-256, so every figure here is the same on every machine.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from math import sqrt

import pytest

from protocol.assignment import compute_prompt_index, compute_slot_seed
from protocol.codec import tagged_hash
from protocol.lottery import PPM, compute_audited_leaves
from protocol.presets import PRESETS
from protocol.task import compute_round_times

PLACE = {"chain_id": 31_337, "ledger": b"\xb0" * 20, "task": b"\x11" * 32, "round_index": 3}
NODE = b"\x07" * 20
LEAVES, AUDIT_PPM = 4, 100_000
#: Standard deviations that a count may be off: 1 in 10^7 for one count.
SIGMAS = 5.3


def make_hash(*words):
    return tagged_hash("test-draw", *(str(word).encode() for word in words))


def draw(root, beacon):
    """Audited leaves of a submission of `LEAVES` groups."""
    return compute_audited_leaves(
        **PLACE, account=NODE, root=root, num_leaves=LEAVES, beacon=beacon, audit_ppm=AUDIT_PPM
    )


def assert_count(seen, expected, trials):
    """A binomial count is as it should be."""
    off = abs(seen - expected * trials) / sqrt(trials * expected * (1 - expected))
    assert off < SIGMAS, f"{seen} of {trials}, expected {expected * trials:.0f}: {off:.1f} standard deviations"


def compute_share():
    """Chance that one given leaf is audited: drawn itself, or nothing is drawn and its hash is the lowest."""
    p = AUDIT_PPM / PPM
    return p + (1 - p) ** LEAVES / LEAVES


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_c6_no_beacon_exists_when_what_it_judges_is_committed(preset):
    times = compute_round_times(preset.schedule, 100, 7)
    assert times.commit_deadline <= times.receipt_deadline
    assert times.audit_block >= times.receipt_deadline, "the audit beacon's block comes after the last commitment"
    assert times.audit_block > times.commit_deadline


def test_c6_grinding_a_root_on_the_beacons_one_knows_does_not_hide_a_leaf():
    """A cheat in leaf 2 tries 100 roots (forged commitments differ in ways nobody looks at) on each of 1,000 beacons that
    exist already, and commits to one under which its leaf goes free. Under the beacon that comes later the leaf is audited as
    often as any other: 10^5 beacons and roots ground, no gain."""
    trials, candidates, caught, ground = 1_000, 100, 0, 0
    for trial in range(trials):
        known = make_hash("known", trial)
        best = None
        for number in range(candidates):
            root = make_hash("root", trial, number)
            if 2 not in draw(root, known):
                best = best or root
            ground += 1
        assert best is not None
        caught += 2 in draw(best, make_hash("later", trial))
    assert ground == 100_000
    assert_count(caught, compute_share(), trials)


def test_c6_grinding_an_account_on_the_beacons_one_knows_does_not_give_an_easy_prompt():
    """Before registration closes, an owner tries 200 accounts on each of 100 old beacons for one that draws prompts from
    the easy tenth; the round's own beacon is another."""
    prompts, easy = 1_000, 100

    def index(account, beacon):
        seed = compute_slot_seed(**PLACE, beacon=beacon, policy=bytes(32), account=account, slot=0)
        return compute_prompt_index(seed, prompts)

    lucky = 0
    for trial in range(100):
        known = make_hash("known", trial)
        accounts = (make_hash("account", trial, number)[:20] for number in range(200))
        best = min(accounts, key=lambda account: index(account, known))
        assert index(best, known) < easy
        lucky += index(best, make_hash("later", trial)) < easy
    assert_count(lucky, easy / prompts, 100)


def test_c6_audit_seeds_are_uniform_by_chi_square():
    """10^5 audit seeds: every leaf is drawn with its probability, and every pair of leaves as if they were independent."""
    trials = 100_000
    single, pairs, fallback = Counter(), Counter(), 0
    p = AUDIT_PPM / PPM
    for number in range(trials):
        drawn = draw(make_hash("root", number), make_hash("beacon", number))
        single.update(drawn)
        pairs.update(combinations(drawn, 2))
        fallback += len(drawn) == 1
    expected = compute_share() * trials
    chi = sum((single[leaf] - expected) ** 2 / (expected * (1 - compute_share())) for leaf in range(LEAVES))
    assert chi < 38.0, f"chi-square {chi:.1f} of {LEAVES} leaves"  # 1 in 10^7 above 38 at 4 degrees of freedom
    expected = p * p * trials
    chi = sum((pairs[pair] - expected) ** 2 / (expected * (1 - p * p)) for pair in combinations(range(LEAVES), 2))
    assert chi < 42.6, f"chi-square {chi:.1f} of 6 pairs"  # the same at 6 degrees of freedom
    assert_count(fallback, (1 - p) ** LEAVES + LEAVES * p * (1 - p) ** (LEAVES - 1), trials)
