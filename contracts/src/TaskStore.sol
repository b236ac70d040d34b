// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IERC20} from "@openzeppelin/contracts/token/ERC20/IERC20.sol";
import {ICourt} from "./ICourt.sol";
import {IStakeRegistry} from "./IStakeRegistry.sol";
import {ITaskBook} from "./ITaskBook.sol";
import {RoundTimes, Terms, TermsLib} from "./Terms.sol";

/// @title What `TaskBook` knows of a task, and how it is read
/// @notice Written by `TaskEscrow` (money) and `TaskBook` (statements) only.
abstract contract TaskStore is ITaskBook {
    using TermsLib for Terms;

    struct Task {
        address initiator;
        uint64 startBlock;
        bool cancelled;
        bool closed;
        uint64 endRound; // first round that does not exist; a whole number of epochs
        uint64 settledEpochs;
        uint64 policyVersion;
        uint128 deposit;
        uint128 remaining;
        uint128 paid; // claimed
        uint128 refunded;
        uint128 burned;
        uint128 pendingPay; // sum over unsettled epochs
        uint128 paidTotal; // settled: claimed or claimable
        uint128 burnedTotal; // settled
        bytes32 root;
        Terms terms;
    }

    /// @inheritdoc ITaskBook
    IERC20 public immutable token;
    /// @inheritdoc ITaskBook
    IStakeRegistry public immutable registry;
    /// @inheritdoc ITaskBook
    address public immutable court;

    mapping(bytes32 task => Task) internal _tasks;
    mapping(bytes32 task => mapping(uint64 epoch => uint128)) internal _pendingPay;
    /// @inheritdoc ITaskBook
    mapping(bytes32 task => mapping(address account => uint256)) public claimedOf;
    /// @inheritdoc ITaskBook
    mapping(address initiator => uint256) public nonceOf;

    constructor(IERC20 token_, IStakeRegistry registry_, ICourt court_) {
        token = token_;
        registry = registry_;
        court = address(court_);
        _wired(address(registry_.token()), address(token_));
        _wired(registry_.court(), address(court_));
        _wired(address(court_.registry()), address(registry_));
        _wired(address(court_.book()), address(this));
    }

    /// @inheritdoc ITaskBook
    function openRound(bytes32 task, uint64 round) external view returns (RoundTimes memory) {
        return _roundTimes(_open(task), round);
    }

    /// @inheritdoc ITaskBook
    function lastRevealOf(bytes32 task, uint64 epoch) public view returns (uint256) {
        Task storage t = _known(task);
        return t.terms.lastReveal(t.startBlock, (uint256(epoch) + 1) * t.terms.epochRounds);
    }

    /// @inheritdoc ITaskBook
    function lastConfirmOf(bytes32 task, uint64 epoch) public view returns (uint256) {
        Task storage t = _known(task);
        return t.terms.lastConfirm(t.startBlock, (uint256(epoch) + 1) * t.terms.epochRounds);
    }

    /// @inheritdoc ITaskBook
    function termsOf(bytes32 task) external view returns (Terms memory) {
        return _known(task).terms;
    }

    /// @inheritdoc ITaskBook
    function escrowOf(bytes32 task)
        external
        view
        returns (uint256 deposit, uint256 paid, uint256 refunded, uint256 burned, uint256 remaining)
    {
        Task storage t = _known(task);
        return (t.deposit, t.paid, t.refunded, t.burned, t.remaining);
    }

    /// @inheritdoc ITaskBook
    function stateOf(bytes32 task)
        external
        view
        returns (address initiator, uint64 startBlock, uint64 endRound, uint64 policyVersion, bool cancelled, bool closed)
    {
        Task storage t = _known(task);
        return (t.initiator, t.startBlock, t.endRound, t.policyVersion, t.cancelled, t.closed);
    }

    /// @inheritdoc ITaskBook
    function settlementOf(bytes32 task)
        external
        view
        returns (uint64 nextEpoch, bytes32 root, uint256 paidTotal, uint256 burnedTotal)
    {
        Task storage t = _known(task);
        return (t.settledEpochs, t.root, t.paidTotal, t.burnedTotal);
    }

    /// @inheritdoc ITaskBook
    function pendingPayOf(bytes32 task, uint64 epoch) external view returns (uint256) {
        return _pendingPay[task][epoch];
    }

    function _known(bytes32 task) internal view returns (Task storage t) {
        t = _tasks[task];
        if (t.initiator == address(0)) revert UnknownTask(task);
    }

    function _open(bytes32 task) internal view returns (Task storage t) {
        t = _known(task);
        if (t.closed) revert TaskIsClosed(task);
    }

    function _roundTimes(Task storage t, uint64 round) internal view returns (RoundTimes memory) {
        if (round >= t.endRound) revert PastTheEnd(round, t.endRound);
        return t.terms.roundTimes(t.startBlock, round);
    }

    function _wired(address found, address expected) internal pure {
        if (found != expected || expected == address(0)) revert WiringMismatch(found, expected);
    }
}
