// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IStakeRegistry} from "./IStakeRegistry.sol";
import {ITaskBook} from "./ITaskBook.sol";

/// @title Verdicts, settlements and challenges
/// @notice Nothing is paid or slashed before two thirds of the verifiers' stake voted for the same settlement and its
/// challenge window is over. Votes weigh what was bonded at the epoch's last reveal deadline.
interface ICourt {
    event VerdictCommitted(bytes32 indexed task, uint64 indexed round, address indexed verifier, bytes32 commitment);
    /// @notice Packed verdict rows and the hash of the public report.
    event VerdictRevealed(
        bytes32 indexed task, uint64 indexed round, address indexed verifier, bytes rows, bytes32 report
    );
    /// @notice `settlement` is keccak256(abi.encode(task, epoch, root, paidTotal, burnedTotal, slashed)).
    event SettlementVoted(
        bytes32 indexed task, uint64 indexed epoch, address indexed verifier, bytes32 settlement, uint256 stake
    );
    /// @notice Two thirds of the stake voted for it; it can be finalized after `challengeEnd`.
    event SettlementPending(
        bytes32 indexed task,
        uint64 indexed epoch,
        bytes32 root,
        uint256 paidTotal,
        uint256 burnedTotal,
        address[] slashed,
        uint64 challengeEnd
    );
    /// @notice `challenger` posted a bond; verifiers vote until `voteEnd`.
    event SettlementChallenged(
        bytes32 indexed task, uint64 indexed epoch, address indexed challenger, uint256 bond, uint64 voteEnd
    );
    /// @notice The pending settlement is gone; the next one builds on the last final root.
    event SettlementVoided(bytes32 indexed task, uint64 indexed epoch);
    /// @notice Earnings under this root can be claimed, its slashes were executed.
    event SettlementFinal(
        bytes32 indexed task, uint64 indexed epoch, bytes32 root, uint256 paidTotal, uint256 burnedTotal
    );

    error VerdictAlreadyCommitted(bytes32 commitment);
    /// @notice What is revealed is not what was committed (zero: nothing was, or it is revealed already).
    error CommitmentMismatch(bytes32 committed, bytes32 revealed);
    /// @notice Verdict rows have 32 bytes each.
    error RowsMisaligned(uint256 length);
    /// @notice The account had no stake at the end of the block that weighs the votes.
    error NoStakeAt(address account, uint256 blockNumber);
    error AlreadyVoted(address account);
    /// @notice Accounts to be slashed are listed in ascending order, each once, and are registered.
    error SlashedListInvalid(uint256 index, address account);
    error PendingAlready(bytes32 task, uint64 epoch);
    error NothingPending(bytes32 task, uint64 epoch);
    error AlreadyChallenged(address challenger);
    error NotChallenged(bytes32 task, uint64 epoch);
    error NoBond(address account);

    /// @notice A verifier commits to its verdict on a round. Needs the round's audit beacon. The first stays.
    /// @param commitment keccak256(abi.encode(task, round, verifier, keccak256(rows), report, salt))
    function commitVerdict(bytes32 task, uint64 round, bytes32 commitment) external;

    /// @notice Reveals it, after all commitments are in.
    /// @param rows packed verdict rows of 32 bytes, at most 1024
    function revealVerdict(bytes32 task, uint64 round, bytes calldata rows, bytes32 report, bytes32 salt) external;

    /// @notice A verifier votes for the settlement of the next unsettled epoch, once per attempt.
    /// @param root cumulative Merkle root of earnings, see `ITaskBook.claim`
    /// @param paidTotal sum of all leaves under the root
    /// @param burnedTotal what the task burned up to now
    /// @param slashed ascending, at most 64
    function voteSettlement(
        bytes32 task, uint64 epoch, bytes32 root, uint256 paidTotal, uint256 burnedTotal, address[] calldata slashed
    ) external;

    /// @notice Challenges the pending settlement, with the task's bond. One challenge per settlement.
    function challenge(bytes32 task, uint64 epoch) external;

    /// @notice A verifier votes on a challenged settlement, once. Silence does not uphold it.
    function voteChallenge(bytes32 task, uint64 epoch, bool uphold) external;

    /// @notice After its windows, executes the pending settlement; or voids it, when it was challenged and less than two
    /// thirds of the stake uphold it. Anybody may.
    function finalize(bytes32 task, uint64 epoch) external;

    /// @notice Pays the caller bonds that could not be sent back when they were due.
    function withdrawBond() external;

    function registry() external view returns (IStakeRegistry);
    function book() external view returns (ITaskBook);
    /// @notice Whether a settlement of this task waits for its windows to end or to be finalized.
    function isPending(bytes32 task) external view returns (bool);
    /// @notice The pending settlement's epoch and last blocks of its windows (`voteEnd` 0: not challenged), and the
    /// stake that upholds it.
    function pendingOf(bytes32 task)
        external
        view
        returns (uint64 epoch, uint64 challengeEnd, uint64 voteEnd, address challenger, uint256 upheld);
    /// @notice How many settlements of this epoch were voided.
    function attemptOf(bytes32 task, uint64 epoch) external view returns (uint64);
    /// @notice Stake that voted for a settlement in the present attempt.
    function tallyOf(bytes32 task, uint64 epoch, bytes32 settlement) external view returns (uint256);
    function verdictCommitmentOf(bytes32 task, uint64 round, address verifier) external view returns (bytes32);
    function bondOf(address account) external view returns (uint256);
}
