"""Canaries in settlement: what is left out, who is slashed, what an always-good verifier comes to."""

from __future__ import annotations

import random

import pytest

from protocol.errors import Reason
from protocol.ledger import events
from protocol.presets import MINIMAL
from protocol.rounds import get_audit_ppm, get_committee, get_members, get_outcomes, get_times, is_suspended
from protocol.settlement import compute_settlement, get_epoch_deadline
from protocol.verdict import Row, Status, pack_rows
from tests.support.ledger_kit import STAKE, TASK, Books, make_account

POOL = tuple(f"v{i}" for i in range(9))
NODE = make_account("a")
CAUGHT = (Status.CHEAT, Reason.REPLAY)
FINE = (Status.GOOD, 0)
BOND = STAKE  # at least what any slash takes of a node of this kit


def make_books(**changes: object) -> Books:
    return Books(nodes={"a": 8}, verifiers=POOL, **changes)


def play(
    books: Books, index: int, said: dict[int, tuple[Status, int]], *, bond: int | None = BOND, votes: str = ""
) -> None:
    """One round of node `a`: committee member i says `said[i]`; opened with `bond` unless None; fresh ones vote y or n."""
    books.open(index)
    books.submit(index, "a", 4)
    books.close(index)
    times = get_times(books.task, index)
    committee = get_committee(books.state, books.task, index)
    for place, (status, reason) in said.items():
        row = Row(NODE, status, int(reason), 4, 80 if status == Status.GOOD else 0, 1)
        revealed = events.VerdictRevealed(TASK, index, committee[place], pack_rows([row]), bytes(32))
        books.emit(revealed, times.verdict_reveal_deadline)
    if bond is not None:
        books.emit(events.CanaryOpened(TASK, index, NODE, 1, bond), times.verdict_reveal_deadline + 1)
    fresh = [account for account in sorted(map(make_account, POOL)) if account not in committee]
    for account, vote in zip(fresh, votes, strict=False):
        books.emit(events.CanaryVoted(TASK, index, NODE, account, vote == "y"), times.opening_deadline)
    books.state.block_number = max(books.state.block_number, times.opening_deadline + 1)


def settle(books: Books, epoch: int = 0):
    books.state.block_number = max(books.state.block_number, get_epoch_deadline(books.task, epoch) + 1)
    return compute_settlement(books.state, books.task, epoch)


def test_v1_who_called_a_caught_canary_good_is_slashed_and_the_node_is_not():
    books = make_books()
    play(books, 0, {0: CAUGHT, 1: CAUGHT, 2: FINE})
    committee = get_committee(books.state, books.task, 0)
    result = settle(books)
    assert result.slashed == (committee[2],)
    fee = books.task.spec.economics.verifier_fee
    assert result.earnings == {committee[0]: fee, committee[1]: fee}
    assert result.burned_total == 0


def test_a_canary_changes_no_history():
    books = make_books(probation_groups=4, audit_ppm=50_000)
    play(books, 0, {0: FINE, 1: FINE, 2: FINE}, bond=None)
    later = next(i for i in range(20) if get_times(books.task, i).start > books.state.block_number)
    play(books, later, {0: CAUGHT, 1: CAUGHT, 2: CAUGHT})
    after = next(i for i in range(40) if get_times(books.task, i).start > books.state.block_number)
    assert get_outcomes(books.state, books.task, later) == {}
    assert not is_suspended(books.state, books.task, NODE, books.state.block_number)
    assert get_audit_ppm(books.state, books.task, NODE, after) == 50_000
    books.open(after)
    assert NODE in get_members(books.state, books.task, after)


@pytest.mark.parametrize(("bond", "slashed"), [(STAKE // 2, False), (STAKE // 2 - 1, True), (0, True)])
def test_v1_a_bond_below_the_slash_leaves_the_slash(bond, slashed):
    books = make_books(slash_bps=5_000)
    play(books, 0, {0: CAUGHT, 1: CAUGHT, 2: CAUGHT}, bond=bond)
    assert (NODE in settle(books).slashed) == slashed
    assert is_suspended(books.state, books.task, NODE, books.state.block_number) == slashed


def test_v1_unbonding_stake_counts_for_the_bond():
    books = make_books(slash_bps=5_000)
    books.emit(events.StakeChanged(NODE, STAKE, STAKE), 2)
    play(books, 0, {0: CAUGHT, 1: CAUGHT, 2: CAUGHT}, bond=STAKE - 1)
    assert NODE in settle(books).slashed


def test_v1_an_insurance_costs_a_slash_in_every_round_that_is_not_opened():
    """A cheat that seals every round pays the bond of each round it is paid for: never less than the slash it avoids."""
    economics = MINIMAL.economics
    slash = economics.node_stake_min * economics.slash_bps // 10_000
    group = 8 * (economics.reward_base + 16 * economics.reward_token)
    assert slash > 100 * group  # a kept seal loses more than a hundred groups earn


@pytest.mark.parametrize(
    ("votes", "slashed"), [("yyyy", True), ("yyyn", False), ("yyy", False), ("nnnnnn", False), ("yyyynn", True)]
)
def test_v1_fresh_verifiers_confirm_with_two_thirds_of_their_stake(votes, slashed):
    books = make_books()
    play(books, 0, {0: FINE, 1: FINE, 2: FINE}, votes=votes)
    committee = set(get_committee(books.state, books.task, 0))
    result = settle(books)
    assert set(result.slashed) == (committee if slashed else set())
    assert NODE not in result.earnings
    assert len(result.earnings) == (0 if slashed else 3)


def test_v1_honest_work_opened_as_a_canary_frames_nobody():
    books = make_books()
    play(books, 0, {0: FINE, 1: FINE, 2: CAUGHT}, votes="yyy")  # one liar in the committee, three among the fresh
    assert settle(books).slashed == ()


def test_v1_two_envelopes_over_one_root_frame_nobody():
    """A node signs an honest envelope for one verifier and one of another policy for the others: no leaf is defective."""
    books = make_books()
    stale = (Status.CHEAT, Reason.STALE_POLICY)
    play(books, 0, {0: stale, 1: stale, 2: FINE})
    assert settle(books).slashed == ()


def test_v1_drawn_verifiers_have_no_vote_and_few_fresh_ones_decide_nothing():
    books = Books(nodes={"a": 8}, verifiers=POOL[:4])
    play(books, 0, {0: FINE, 1: FINE, 2: FINE}, votes="y")
    for drawn in get_committee(books.state, books.task, 0):
        books.emit(events.CanaryVoted(TASK, 0, NODE, drawn, True))
    assert settle(books).slashed == ()


def test_a_pool_that_is_the_committee_has_the_committee_only():
    books = Books(nodes={"a": 8}, verifiers=POOL[:3])
    play(books, 0, {0: FINE, 1: FINE, 2: FINE})
    play(books, 1, {0: CAUGHT, 1: CAUGHT, 2: FINE})
    assert settle(books).slashed == (get_committee(books.state, books.task, 1)[2],)


def test_a_verifier_is_slashed_in_every_epoch_in_which_it_did_not_look():
    books = make_books(epoch_rounds=1)
    for index in range(2):
        play(books, index, {0: CAUGHT, 1: CAUGHT, 2: FINE})
        assert settle(books, index).slashed == (get_committee(books.state, books.task, index)[2],)


def test_a_canary_that_was_not_committed_is_nothing():
    books = make_books()
    books.emit(events.CanaryOpened(TASK, 0, NODE, 1, BOND))
    books.emit(events.CanaryVoted(TASK, 0, NODE, make_account("v0"), True))
    assert books.task.canaries == {}


def simulate(rate: float, seed: int, *, lazy: str = "v0", rounds: int = 200) -> dict[str, int]:
    """Fees minus slashes of verifiers over rounds of a task, one of them always-good, at the default economics.

    Stakes follow settlements as on the ledger: after a slash the stake is below the minimum and the verifier is not drawn.
    """
    economics, rng = MINIMAL.economics, random.Random(seed)
    books = make_books(
        epoch_rounds=10, num_epochs=rounds // 10, verifier_fee=economics.verifier_fee, slash_bps=economics.slash_bps,
        verifier_stake_min=STAKE,
    )  # fmt: skip
    slashes: dict[bytes, int] = {}
    names = {make_account(name): name for name in POOL}
    for index in range(rounds):
        is_canary = rng.random() < rate
        books.open(index)
        books.submit(index, "a", 4)
        books.close(index)
        committee = get_committee(books.state, books.task, index)
        lazies = {place for place, account in enumerate(committee) if names[account] == lazy}
        said = {place: CAUGHT if is_canary and place not in lazies else FINE for place in range(len(committee))}
        times = get_times(books.task, index)
        for place, (status, reason) in said.items():
            row = Row(NODE, status, int(reason), 4, 80 if status == Status.GOOD else 0, 1)
            revealed = events.VerdictRevealed(TASK, index, committee[place], pack_rows([row]), bytes(32))
            books.emit(revealed, times.verdict_reveal_deadline)
        if is_canary:
            books.emit(events.CanaryOpened(TASK, index, NODE, 1, BOND), times.verdict_reveal_deadline + 1)
        if index % 10 == 9:
            result = settle(books, index // 10)
            for account in result.slashed:
                taken = books.state.participants[account].bonded * economics.slash_bps // 10_000
                slashes[account] = slashes.get(account, 0) + taken * economics.verifier_stake_min // STAKE
                books.set_stake(
                    names[account], books.state.participants[account].bonded - taken, books.state.block_number
                )
    return {name: result.earnings.get(account, 0) - slashes.get(account, 0) for account, name in names.items()}


@pytest.mark.parametrize("rate", [0.01, 0.02])
def test_v1_an_always_good_verifier_loses_within_200_rounds_and_a_careful_one_does_not(rate):
    """The mean over simulated tasks: a bot among eight careful verifiers, committees of three, canaries in `rate` of rounds."""
    runs = [simulate(rate, seed) for seed in range(6)]
    assert sum(run["v0"] for run in runs) < 0
    assert all(run[name] > 0 for run in runs for name in POOL[1:])
