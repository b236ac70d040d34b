// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IERC20} from "@openzeppelin/contracts/token/ERC20/IERC20.sol";
import {IBeacons} from "./IBeacons.sol";
import {IStakeRegistry} from "./IStakeRegistry.sol";
import {RoundTimes, Terms} from "./Terms.sol";

/// @title Tasks, their escrow, and what nodes, relays and trainers state about them
/// @notice For each task, at all times: deposit = paid + refunded + burned + remaining. The sum of `remaining` over all
/// tasks is what this contract holds (tokens sent to it unasked belong to nobody and are never counted).
interface ITaskBook {
    /// @notice `spec` is the canonical encoding of the task, `startBlock` the first block of round 0.
    event TaskPublished(
        bytes32 indexed task, address indexed initiator, uint64 startBlock, uint256 deposit, bytes spec
    );
    /// @notice `deposit` is the new total.
    event TaskToppedUp(bytes32 indexed task, uint256 deposit);
    /// @notice From epoch `fromEpoch` on, the node declares `slots` leaves in every round.
    event NodeJoined(bytes32 indexed task, address indexed account, uint32 slots, uint64 fromEpoch);
    /// @notice The node's last epoch is the one before `fromEpoch`.
    event NodeLeft(bytes32 indexed task, address indexed account, uint64 fromEpoch);
    /// @notice The Merkle root over a node's leaves of one round: the first, there is no second.
    event RootCommitted(
        bytes32 indexed task, uint64 indexed round, address indexed account, bytes32 root, uint32 leaves, bytes32 policy
    );
    /// @notice `relay` holds and serves the bundles of `accounts`, none of which had a receipt before.
    event BundlesReceipted(bytes32 indexed task, uint64 indexed round, address indexed relay, address[] accounts);
    /// @notice A policy, the manifest that describes its bytes, and the lineage that made it.
    event PolicyRecorded(
        bytes32 indexed task, uint64 indexed version, bytes32 policy, bytes32 manifest, bytes32 batchRoot, bytes32 lineage
    );
    /// @notice `account` fetched every byte of this policy and serves it.
    event PolicyAttested(bytes32 indexed task, uint64 indexed version, address indexed account);
    /// @notice `amount` went to `account`, whose claims now total `cumulative`.
    event Claimed(bytes32 indexed task, address indexed account, uint256 amount, uint256 cumulative);
    /// @notice No round opens at or after `endRound`.
    event TaskCancelled(bytes32 indexed task, uint64 endRound);
    /// @notice What nobody earned went back to the initiator, what was never judged was burned.
    event TaskClosed(bytes32 indexed task, uint256 refunded, uint256 burned);

    error UnknownTask(bytes32 task);
    error TaskIsClosed(bytes32 task);
    error TaskIsCancelled(bytes32 task);
    /// @notice The round or epoch is not funded, or was cancelled: the first that does not exist is `end`.
    error PastTheEnd(uint256 roundOrEpoch, uint256 end);
    error DepositBelowOneEpoch(uint256 deposit, uint256 needed);
    error SlotsOutOfRange(uint256 slots, uint256 limit);
    /// @notice Pay in flight over all tasks may be four times the bonded stake, no more.
    error ReservedAboveStake(uint256 reserved, uint256 limit);
    /// @notice A membership can change from epoch `fromEpoch` on.
    error StillMember(uint64 fromEpoch);
    error NotMember(bytes32 task, address account);
    /// @notice The node does not take part in this epoch.
    error NotMemberInEpoch(address account, uint256 epoch);
    error AlreadyCommitted(bytes32 root);
    error NotCommitted(address account);
    error WrongPolicyVersion(uint64 version, uint64 expected);
    error UnknownPolicy(uint64 version, uint64 latest);
    error AlreadyAttested(address account);
    /// @notice Epochs settle in order.
    error WrongEpoch(uint64 epoch, uint64 expected);
    /// @notice Settled totals only grow.
    error TotalsShrink(uint256 paidTotal, uint256 burnedTotal, uint256 paidBefore, uint256 burnedBefore);
    error SettlementAboveDeposit(uint256 paidTotal, uint256 burnedTotal, uint256 deposit);
    error BadProof(address account, uint256 cumulative);
    error NothingToClaim(uint256 alreadyClaimed);
    /// @notice The leaves under the root add up to more than was settled.
    error ClaimAboveSettled(uint256 claimedTotal, uint256 paidTotal);
    error LengthMismatch(uint256 accounts, uint256 cumulatives, uint256 proofs);
    error SettlementIsPending(bytes32 task);
    /// @notice Epochs up to `end` are to be settled before block `timeoutBlock` is over, and `settled` are.
    error NotClosable(uint64 settled, uint256 end, uint256 timeoutBlock);
    /// @notice The contracts of this ledger were deployed with wrong addresses.
    error WiringMismatch(address found, address expected);

    /// @notice Publishes a task and escrows `deposit`. Round 0 starts `startDelayBlocks` from now. Policy version 0 is
    /// recorded at once.
    /// @param terms what this contract enforces; readers refuse a task whose spec implies other terms
    /// @param spec canonical encoding, at most 4096 bytes
    /// @param deposit at least one epoch's maximal pay; as many epochs run as it covers
    /// @return task keccak256(abi.encode(chainid, this, initiator, initiator's nonce, keccak256(spec)))
    function publish(Terms calldata terms, bytes calldata spec, uint256 deposit) external returns (bytes32 task);

    /// @notice Adds to the escrow, and so perhaps to the funded epochs. Anybody may.
    function topUp(bytes32 task, uint256 amount) external;

    /// @notice Ends the task with the present epoch, or before it starts. Only the initiator.
    function cancel(bytes32 task) external;

    /// @notice Takes part from the next epoch on, with `slots` leaves a round. Reserves two epochs' maximal pay.
    function join(bytes32 task, uint32 slots) external;

    /// @notice Takes part no longer from the next epoch on. The reservation ends when the work can no longer be slashed.
    function leave(bytes32 task) external;

    /// @notice Commits to the leaves of one round. Needs the round's beacon.
    function commit(bytes32 task, uint64 round, bytes32 root, uint32 leaves, bytes32 policy) external;

    /// @notice A relay states that it holds and serves these nodes' bundles. First receipts count, others are skipped.
    function receipt(bytes32 task, uint64 round, address[] calldata accounts) external;

    /// @notice The trainer records the next policy version.
    function recordPolicy(
        bytes32 task, uint64 version, bytes32 policy, bytes32 manifest, bytes32 batchRoot, bytes32 lineage
    ) external;

    /// @notice A relay or verifier states that it holds and serves a policy. Two attestations are recorded, more are
    /// ignored.
    function attestPolicy(bytes32 task, uint64 version) external;

    /// @notice Makes earnings claimable and burns what the settlement burns. Only the Court.
    function settle(bytes32 task, uint64 epoch, bytes32 root, uint256 paidTotal, uint256 burnedTotal) external;

    /// @notice Pays `account` what it has earned and not claimed yet. Anybody may send it.
    /// @param cumulative the account's total under the final root
    /// @param proof of the leaf keccak256(bytes.concat(keccak256(abi.encode(task, account, cumulative))))
    function claim(bytes32 task, address account, uint256 cumulative, bytes32[] calldata proof) external;

    /// @notice Claims for many accounts; those with nothing due are skipped.
    function claimMany(
        bytes32 task, address[] calldata accounts, uint256[] calldata cumulatives, bytes32[][] calldata proofs
    ) external;

    /// @notice Ends the task: when its last epoch is settled, or `timeoutBlocks` after it could be, with no
    /// settlement pending. Earnings stay claimable for ever. Anybody may.
    function close(bytes32 task) external;

    /// @notice Reverts unless `settle` with these arguments would be accepted now, and at any time while it is pending.
    function checkSettlement(bytes32 task, uint64 epoch, uint256 paidTotal, uint256 burnedTotal) external view;

    /// @notice Reverts unless `round` exists in an open task. Returns its deadlines.
    function openRound(bytes32 task, uint64 round) external view returns (RoundTimes memory);

    /// @notice Last reveal deadline of an epoch: the block whose stakes weigh the votes on its settlement.
    function lastRevealOf(bytes32 task, uint64 epoch) external view returns (uint256);

    /// @notice Last block in which a canary of an epoch can be voted on: the epoch can be settled after it.
    function lastConfirmOf(bytes32 task, uint64 epoch) external view returns (uint256);

    function token() external view returns (IERC20);
    function registry() external view returns (IStakeRegistry);
    function beacons() external view returns (IBeacons);
    function court() external view returns (address);
    function termsOf(bytes32 task) external view returns (Terms memory);
    function nonceOf(address initiator) external view returns (uint256);

    /// @notice Where the money of a task is: deposit = paid + refunded + burned + remaining.
    function escrowOf(bytes32 task)
        external
        view
        returns (uint256 deposit, uint256 paid, uint256 refunded, uint256 burned, uint256 remaining);

    function stateOf(bytes32 task)
        external
        view
        returns (address initiator, uint64 startBlock, uint64 endRound, uint64 policyVersion, bool cancelled, bool closed);

    /// @notice The last final settlement; `nextEpoch` is the one to be settled next.
    function settlementOf(bytes32 task)
        external
        view
        returns (uint64 nextEpoch, bytes32 root, uint256 paidTotal, uint256 burnedTotal);

    function claimedOf(bytes32 task, address account) external view returns (uint256);
    /// @notice The node takes part in epochs from `fromEpoch` up to and without `toEpoch`.
    function memberOf(bytes32 task, address account)
        external
        view
        returns (uint32 slots, uint64 fromEpoch, uint64 toEpoch);
    function commitmentOf(bytes32 task, uint64 round, address account)
        external
        view
        returns (bytes32 root, uint32 leaves, bool receipted);
    function attestationsOf(bytes32 task, uint64 version) external view returns (uint256);
    /// @notice Maximal pay of receipted and unsettled leaves, at most what the epoch can cost.
    function pendingPayOf(bytes32 task, uint64 epoch) external view returns (uint256);
    /// @notice Pay reserved by an account over all tasks.
    function reservedOf(address account) external view returns (uint256);
}
