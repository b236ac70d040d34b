// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IERC20} from "@openzeppelin/contracts/token/ERC20/IERC20.sol";
import {SafeERC20} from "@openzeppelin/contracts/token/ERC20/utils/SafeERC20.sol";
import {ReentrancyGuardTransient} from "@openzeppelin/contracts/utils/ReentrancyGuardTransient.sol";
import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";
import {ICourt} from "./ICourt.sol";
import {IStakeRegistry} from "./IStakeRegistry.sol";
import {ITaskBook} from "./ITaskBook.sol";
import {Roles} from "./Roles.sol";
import {RoundTimes, Terms} from "./Terms.sol";
import {Tokens} from "./Tokens.sol";
import {BeaconMissing, StakeTooLow, TooEarly, TooLate, TooLong, WrongRole, ZeroValue} from "./Errors.sol";

/// @title Court
/// @notice Holds challenge bonds, nothing else. Whatever could make a settlement fail is refused when it is voted for, so
/// a pending settlement can always be finalized, by anybody, and no task is stuck behind it.
contract Court is ICourt, ReentrancyGuardTransient {
    using SafeCast for uint256;
    using SafeERC20 for IERC20;

    struct Pending {
        uint64 epoch;
        uint64 challengeEnd; // 0: nothing is pending
        uint64 voteEnd; // 0: not challenged
        address challenger;
        uint96 bond;
        uint256 upheld; // stake
        bytes32 root;
        uint256 paidTotal;
        uint256 burnedTotal;
        address[] slashed;
    }

    uint256 private constant ROW_BYTES = 32;
    uint256 private constant ROWS_MAX = 1024;
    uint256 private constant SLASHED_MAX = 64;

    /// @inheritdoc ICourt
    IStakeRegistry public immutable registry;
    /// @inheritdoc ICourt
    ITaskBook public immutable book;
    IERC20 private immutable _token;

    /// @inheritdoc ICourt
    mapping(bytes32 task => mapping(uint64 round => mapping(address verifier => bytes32))) public verdictCommitmentOf;
    /// @inheritdoc ICourt
    mapping(bytes32 task => mapping(uint64 epoch => uint64)) public attemptOf;
    /// @inheritdoc ICourt
    mapping(address account => uint256) public bondOf;
    mapping(bytes32 task => Pending) private _pending;
    /// @dev Keyed by ballot, see `_ballot`; then by settlement or voter.
    mapping(bytes32 ballot => mapping(bytes32 settlement => uint256)) private _tally;
    mapping(bytes32 ballot => mapping(address verifier => bool)) private _voted;
    mapping(bytes32 ballot => mapping(address verifier => bool)) private _votedOnChallenge;

    /// @param book_ address the task book will have; it checks the wiring when it is deployed
    constructor(IStakeRegistry registry_, ITaskBook book_) {
        if (address(registry_) == address(0) || address(book_) == address(0)) revert ZeroValue();
        registry = registry_;
        book = book_;
        _token = registry_.token();
    }

    /// @inheritdoc ICourt
    function commitVerdict(bytes32 task, uint64 round, bytes32 commitment) external {
        if (commitment == 0) revert ZeroValue();
        RoundTimes memory times = book.openRound(task, round);
        _requireUntil(times.verdictCommitDeadline);
        _requireVerifier(task);
        bytes32 present = verdictCommitmentOf[task][round][msg.sender];
        if (present != 0) revert VerdictAlreadyCommitted(present);
        if (book.beacons().hashOf(times.auditBlock.toUint64()) == 0) revert BeaconMissing(times.auditBlock);
        verdictCommitmentOf[task][round][msg.sender] = commitment;
        emit VerdictCommitted(task, round, msg.sender, commitment);
    }

    /// @inheritdoc ICourt
    function revealVerdict(bytes32 task, uint64 round, bytes calldata rows, bytes32 report, bytes32 salt) external {
        RoundTimes memory times = book.openRound(task, round);
        _requireAfter(times.verdictCommitDeadline);
        _requireUntil(times.verdictRevealDeadline);
        if (rows.length > ROW_BYTES * ROWS_MAX) revert TooLong(rows.length, ROW_BYTES * ROWS_MAX);
        if (rows.length % ROW_BYTES != 0) revert RowsMisaligned(rows.length);
        bytes32 committed = verdictCommitmentOf[task][round][msg.sender];
        bytes32 revealed = keccak256(abi.encode(task, round, msg.sender, keccak256(rows), report, salt));
        if (committed != revealed) revert CommitmentMismatch(committed, revealed);
        // Gone for good: the last block for commitments is over.
        delete verdictCommitmentOf[task][round][msg.sender];
        emit VerdictRevealed(task, round, msg.sender, rows, report);
    }

    /// @inheritdoc ICourt
    function voteSettlement(
        bytes32 task,
        uint64 epoch,
        bytes32 root,
        uint256 paidTotal,
        uint256 burnedTotal,
        address[] calldata slashed
    ) external nonReentrant {
        if (isPending(task)) revert PendingAlready(task, _pending[task].epoch);
        book.checkSettlement(task, epoch, paidTotal, burnedTotal);
        _checkSlashed(slashed);
        (uint256 weight, uint256 total) = _weigh(task, epoch);
        bytes32 ballot = _ballot(task, epoch);
        if (_voted[ballot][msg.sender]) revert AlreadyVoted(msg.sender);
        _voted[ballot][msg.sender] = true;

        bytes32 settlement = keccak256(abi.encode(task, epoch, root, paidTotal, burnedTotal, slashed));
        uint256 tally = _tally[ballot][settlement] + weight;
        _tally[ballot][settlement] = tally;
        emit SettlementVoted(task, epoch, msg.sender, settlement, weight);
        if (!_isTwoThirds(tally, total)) return;

        Pending storage p = _pending[task];
        p.epoch = epoch;
        p.challengeEnd = _windowEnd(task);
        p.root = root;
        p.paidTotal = paidTotal;
        p.burnedTotal = burnedTotal;
        p.slashed = slashed;
        emit SettlementPending(task, epoch, root, paidTotal, burnedTotal, slashed, p.challengeEnd);
    }

    /// @inheritdoc ICourt
    function challenge(bytes32 task, uint64 epoch) external nonReentrant {
        Pending storage p = _requirePending(task, epoch);
        if (p.voteEnd != 0) revert AlreadyChallenged(p.challenger);
        _requireUntil(p.challengeEnd);
        if (registry.roleOf(msg.sender) == Roles.NONE) revert WrongRole(msg.sender, Roles.NONE);
        p.challenger = msg.sender;
        p.bond = book.termsOf(task).challengeBond;
        p.voteEnd = _windowEnd(task);
        Tokens.pull(_token, msg.sender, p.bond);
        emit SettlementChallenged(task, epoch, msg.sender, p.bond, p.voteEnd);
    }

    /// @inheritdoc ICourt
    function voteChallenge(bytes32 task, uint64 epoch, bool uphold) external nonReentrant {
        Pending storage p = _requirePending(task, epoch);
        if (p.voteEnd == 0) revert NotChallenged(task, epoch);
        _requireUntil(p.voteEnd);
        (uint256 weight,) = _weigh(task, epoch);
        bytes32 ballot = _ballot(task, epoch);
        if (_votedOnChallenge[ballot][msg.sender]) revert AlreadyVoted(msg.sender);
        _votedOnChallenge[ballot][msg.sender] = true;
        if (uphold) p.upheld += weight;
    }

    /// @inheritdoc ICourt
    function finalize(bytes32 task, uint64 epoch) external nonReentrant {
        Pending memory p = _requirePending(task, epoch);
        _requireAfter(p.challengeEnd);
        _requireAfter(p.voteEnd);
        delete _pending[task];

        bool isChallenged = p.voteEnd != 0;
        if (isChallenged && !_isTwoThirds(p.upheld, _electorate(book.lastRevealOf(task, epoch)))) {
            attemptOf[task][epoch] += 1;
            emit SettlementVoided(task, epoch);
            _returnBond(p.challenger, p.bond);
            return;
        }
        emit SettlementFinal(task, epoch, p.root, p.paidTotal, p.burnedTotal);
        book.settle(task, epoch, p.root, p.paidTotal, p.burnedTotal);
        uint256 slashBps = book.termsOf(task).slashBps;
        for (uint256 i = 0; i < p.slashed.length; ++i) {
            registry.slash(p.slashed[i], task, slashBps);
        }
        Tokens.burn(_token, p.bond);
    }

    /// @inheritdoc ICourt
    function withdrawBond() external nonReentrant {
        uint256 amount = bondOf[msg.sender];
        if (amount == 0) revert NoBond(msg.sender);
        delete bondOf[msg.sender];
        Tokens.push(_token, msg.sender, amount);
    }

    /// @inheritdoc ICourt
    function isPending(bytes32 task) public view returns (bool) {
        return _pending[task].challengeEnd != 0;
    }

    /// @inheritdoc ICourt
    function pendingOf(bytes32 task)
        external
        view
        returns (uint64 epoch, uint64 challengeEnd, uint64 voteEnd, address challenger, uint256 upheld)
    {
        Pending storage p = _pending[task];
        return (p.epoch, p.challengeEnd, p.voteEnd, p.challenger, p.upheld);
    }

    /// @inheritdoc ICourt
    function tallyOf(bytes32 task, uint64 epoch, bytes32 settlement) external view returns (uint256) {
        return _tally[_ballot(task, epoch)][settlement];
    }

    /// @dev A challenger that cannot be paid must not keep the task from going on: its bond waits for it.
    function _returnBond(address challenger, uint256 bond) private {
        if (bond == 0) return;
        if (!_token.trySafeTransfer(challenger, bond)) bondOf[challenger] += bond;
    }

    /// @dev All votes of one attempt at an epoch. A voided attempt leaves nothing behind that the next could count.
    function _ballot(bytes32 task, uint64 epoch) private view returns (bytes32) {
        return keccak256(abi.encode(task, epoch, attemptOf[task][epoch]));
    }

    function _windowEnd(bytes32 task) private view returns (uint64) {
        return (block.number + book.termsOf(task).challengeBlocks).toUint64();
    }

    function _requireVerifier(bytes32 task) private view {
        uint8 role = registry.roleOf(msg.sender);
        if (role != Roles.VERIFIER) revert WrongRole(msg.sender, role);
        uint256 bonded = registry.bondedOf(msg.sender);
        uint256 needed = book.termsOf(task).verifierStakeMin;
        if (bonded < needed) revert StakeTooLow(msg.sender, bonded, needed);
    }

    /// @dev The caller's stake and all verifiers' stake at the epoch's last reveal deadline. Present stake would let the
    /// same tokens vote twice (unbond, move, bond again) or shrink the total by unbonding after a vote.
    function _weigh(bytes32 task, uint64 epoch) private view returns (uint256 weight, uint256 total) {
        _requireVerifier(task);
        uint256 snapshot = book.lastRevealOf(task, epoch);
        weight = registry.bondedAt(msg.sender, snapshot);
        if (weight == 0) revert NoStakeAt(msg.sender, snapshot);
        total = _electorate(snapshot);
    }

    function _electorate(uint256 snapshot) private view returns (uint256) {
        return registry.totalBondedAt(Roles.VERIFIER, snapshot);
    }

    function _requirePending(bytes32 task, uint64 epoch) private view returns (Pending storage p) {
        p = _pending[task];
        if (p.challengeEnd == 0 || p.epoch != epoch) revert NothingPending(task, epoch);
    }

    function _checkSlashed(address[] calldata slashed) private view {
        if (slashed.length > SLASHED_MAX) revert TooLong(slashed.length, SLASHED_MAX);
        for (uint256 i = 0; i < slashed.length; ++i) {
            bool isAscending = i == 0 || slashed[i] > slashed[i - 1];
            if (!isAscending || registry.roleOf(slashed[i]) == Roles.NONE) revert SlashedListInvalid(i, slashed[i]);
        }
    }

    function _requireAfter(uint256 blockNumber) private view {
        if (block.number <= blockNumber) revert TooEarly(block.number, blockNumber + 1);
    }

    function _requireUntil(uint256 lastBlock) private view {
        if (block.number > lastBlock) revert TooLate(block.number, lastBlock);
    }

    function _isTwoThirds(uint256 stake, uint256 total) private pure returns (bool) {
        return stake * 3 >= total * 2;
    }
}
