// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IERC20} from "@openzeppelin/contracts/token/ERC20/IERC20.sol";
import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";
import {IBeacons} from "./IBeacons.sol";
import {ICourt} from "./ICourt.sol";
import {IStakeRegistry} from "./IStakeRegistry.sol";
import {ITaskBook} from "./ITaskBook.sol";
import {Roles} from "./Roles.sol";
import {TaskEscrow} from "./TaskEscrow.sol";
import {TaskStore} from "./TaskStore.sol";
import {RoundTimes, Terms, TermsLib} from "./Terms.sol";
import {
    BeaconMissing, StakeTooLow, TooEarly, TooLate, TooLong, Unauthorized, WrongRole, ZeroValue
} from "./Errors.sol";

/// @title Task book: what nodes, relays and trainers state, on top of the escrow
/// @notice No statement can be taken back or replaced, and each has a last block. Nothing here moves money.
contract TaskBook is TaskEscrow {
    using SafeCast for uint256;
    using TermsLib for Terms;

    struct Member {
        uint32 slots;
        uint64 fromEpoch;
        uint64 toEpoch; // first epoch without the node; MEMBER_FOR_GOOD until it leaves
    }

    struct Commitment {
        bytes32 root;
        uint32 leaves;
        bool receipted;
    }

    /// @dev All the reservations of an account. Those of tasks it left form one sum, held until the latest of them ends.
    struct Reservation {
        uint256 amount;
        uint256 leaving; // part of `amount`
        uint256 leavingUntil; // last block in which `leaving` counts
    }

    uint64 private constant MEMBER_FOR_GOOD = type(uint64).max;
    uint256 private constant RESERVED_EPOCHS = 2;
    uint256 private constant RESERVED_PER_STAKE_MAX = 4;
    uint256 private constant ATTESTATIONS_MAX = 2;

    /// @inheritdoc ITaskBook
    IBeacons public immutable beacons;

    mapping(bytes32 task => mapping(address account => Member)) private _members;
    mapping(bytes32 task => mapping(uint64 round => mapping(address account => Commitment))) private _commitments;
    mapping(bytes32 task => mapping(uint64 version => address[])) private _attesters;
    mapping(address account => Reservation) private _reservations;

    /// @dev Deployed last: it refuses contracts that do not name each other and itself.
    constructor(IERC20 token_, IStakeRegistry registry_, IBeacons beacons_, ICourt court_)
        TaskStore(token_, registry_, court_)
    {
        if (address(beacons_) == address(0)) revert ZeroValue();
        beacons = beacons_;
    }

    /// @inheritdoc ITaskBook
    function join(bytes32 task, uint32 slots) external {
        Task storage t = _open(task);
        if (slots == 0 || slots > t.terms.slotsMax) revert SlotsOutOfRange(slots, t.terms.slotsMax);
        uint64 fromEpoch = t.terms.nextEpoch(t.startBlock);
        uint256 endEpoch = t.endRound / t.terms.epochRounds;
        if (fromEpoch >= endEpoch) revert PastTheEnd(fromEpoch, endEpoch);
        Member storage member = _members[task][msg.sender];
        // A membership that ended before it began leaves no trace; any other must be over before a new one starts.
        if (member.toEpoch > member.fromEpoch && fromEpoch <= member.toEpoch) revert StillMember(member.toEpoch);

        uint256 bonded = _requireStake(Roles.NODE, t.terms.nodeStakeMin);
        Reservation storage reservation = _reservations[msg.sender];
        _expire(reservation);
        reservation.amount += _reservationOf(t, slots);
        _requireReserved(reservation.amount, bonded);
        _members[task][msg.sender] = Member(slots, fromEpoch, MEMBER_FOR_GOOD);
        emit NodeJoined(task, msg.sender, slots, fromEpoch);
    }

    /// @inheritdoc ITaskBook
    function leave(bytes32 task) external {
        Task storage t = _known(task);
        Member storage member = _members[task][msg.sender];
        if (member.toEpoch != MEMBER_FOR_GOOD) revert NotMember(task, msg.sender);
        uint64 toEpoch = t.terms.nextEpoch(t.startBlock);
        member.toEpoch = toEpoch;

        Reservation storage reservation = _reservations[msg.sender];
        _expire(reservation);
        uint256 amount = _reservationOf(t, member.slots);
        if (t.closed || toEpoch == member.fromEpoch) {
            reservation.amount -= amount;
        } else {
            // Its work can be slashed until its last epoch is settled, a challenge and its vote included.
            uint256 until = lastConfirmOf(task, toEpoch - 1) + 2 * uint256(t.terms.challengeBlocks);
            reservation.leaving += amount;
            if (until > reservation.leavingUntil) reservation.leavingUntil = until;
        }
        emit NodeLeft(task, msg.sender, toEpoch);
    }

    /// @inheritdoc ITaskBook
    function commit(bytes32 task, uint64 round, bytes32 root, uint32 leaves, bytes32 policy) external {
        Task storage t = _open(task);
        RoundTimes memory times = _roundTimes(t, round);
        _requireUntil(times.commitDeadline);
        if (root == 0) revert ZeroValue();
        Member memory member = _members[task][msg.sender];
        uint64 epoch = round / t.terms.epochRounds;
        if (epoch < member.fromEpoch || epoch >= member.toEpoch) revert NotMemberInEpoch(msg.sender, epoch);
        if (leaves == 0 || leaves > member.slots) revert SlotsOutOfRange(leaves, member.slots);
        Commitment storage commitment = _commitments[task][round][msg.sender];
        if (commitment.root != 0) revert AlreadyCommitted(commitment.root);
        _requireReserved(reservedOf(msg.sender), _requireStake(Roles.NODE, t.terms.nodeStakeMin));
        if (beacons.hashOf(times.start.toUint64()) == 0) revert BeaconMissing(times.start);
        commitment.root = root;
        commitment.leaves = leaves;
        emit RootCommitted(task, round, msg.sender, root, leaves, policy);
    }

    /// @inheritdoc ITaskBook
    function receipt(bytes32 task, uint64 round, address[] calldata accounts) external {
        Task storage t = _open(task);
        RoundTimes memory times = _roundTimes(t, round);
        if (block.number <= times.start) revert TooEarly(block.number, times.start + 1);
        _requireUntil(times.receiptDeadline);
        if (accounts.length > LIST_MAX) revert TooLong(accounts.length, LIST_MAX);
        _requireStake(Roles.RELAY, t.terms.verifierStakeMin);

        address[] memory fresh = new address[](accounts.length);
        uint256 count = 0;
        uint256 leaves = 0;
        for (uint256 i = 0; i < accounts.length; ++i) {
            Commitment storage commitment = _commitments[task][round][accounts[i]];
            if (commitment.root == 0) revert NotCommitted(accounts[i]);
            if (commitment.receipted) continue;
            commitment.receipted = true;
            leaves += commitment.leaves;
            fresh[count++] = accounts[i];
        }
        if (count == 0) return;
        assembly ("memory-safe") {
            mstore(fresh, count) // shorter than it was allocated
        }
        _addPendingPay(t, task, round / t.terms.epochRounds, leaves * t.terms.leafPayMax);
        emit BundlesReceipted(task, round, msg.sender, fresh);
    }

    /// @inheritdoc ITaskBook
    function recordPolicy(
        bytes32 task,
        uint64 version,
        bytes32 policy,
        bytes32 manifest,
        bytes32 batchRoot,
        bytes32 lineage
    ) external {
        Task storage t = _open(task);
        if (msg.sender != t.terms.trainer) revert Unauthorized(msg.sender, t.terms.trainer);
        if (version != t.policyVersion + 1) revert WrongPolicyVersion(version, t.policyVersion + 1);
        if (policy == 0) revert ZeroValue();
        t.policyVersion = version;
        emit PolicyRecorded(task, version, policy, manifest, batchRoot, lineage);
    }

    /// @inheritdoc ITaskBook
    function attestPolicy(bytes32 task, uint64 version) external {
        Task storage t = _open(task);
        uint8 role = registry.roleOf(msg.sender);
        // A made-up crowd of relays could else call a withheld policy available.
        _requireStake(role == Roles.RELAY ? Roles.RELAY : Roles.VERIFIER, t.terms.verifierStakeMin);
        if (version > t.policyVersion) revert UnknownPolicy(version, t.policyVersion);
        address[] storage attesters = _attesters[task][version];
        uint256 count = attesters.length;
        for (uint256 i = 0; i < count; ++i) {
            if (attesters[i] == msg.sender) revert AlreadyAttested(msg.sender);
        }
        if (count == ATTESTATIONS_MAX) return;
        attesters.push(msg.sender);
        emit PolicyAttested(task, version, msg.sender);
    }

    /// @inheritdoc ITaskBook
    function memberOf(bytes32 task, address account)
        external
        view
        returns (uint32 slots, uint64 fromEpoch, uint64 toEpoch)
    {
        Member memory member = _members[task][account];
        return (member.slots, member.fromEpoch, member.toEpoch);
    }

    /// @inheritdoc ITaskBook
    function commitmentOf(bytes32 task, uint64 round, address account)
        external
        view
        returns (bytes32 root, uint32 leaves, bool receipted)
    {
        Commitment memory commitment = _commitments[task][round][account];
        return (commitment.root, commitment.leaves, commitment.receipted);
    }

    /// @inheritdoc ITaskBook
    function attestationsOf(bytes32 task, uint64 version) external view returns (uint256) {
        return _attesters[task][version].length;
    }

    /// @inheritdoc ITaskBook
    function reservedOf(address account) public view returns (uint256) {
        Reservation storage reservation = _reservations[account];
        return block.number > reservation.leavingUntil ? reservation.amount - reservation.leaving : reservation.amount;
    }

    function _requireStake(uint8 role, uint256 needed) private view returns (uint256 bonded) {
        uint8 present = registry.roleOf(msg.sender);
        if (present != role) revert WrongRole(msg.sender, present);
        bonded = registry.bondedOf(msg.sender);
        if (bonded < needed) revert StakeTooLow(msg.sender, bonded, needed);
    }

    function _requireReserved(uint256 reserved, uint256 bonded) private pure {
        if (reserved > RESERVED_PER_STAKE_MAX * bonded) {
            revert ReservedAboveStake(reserved, RESERVED_PER_STAKE_MAX * bonded);
        }
    }

    function _requireUntil(uint256 lastBlock) private view {
        if (block.number > lastBlock) revert TooLate(block.number, lastBlock);
    }

    function _reservationOf(Task storage t, uint256 slots) private view returns (uint256) {
        return slots * t.terms.leafPayMax * t.terms.epochRounds * RESERVED_EPOCHS;
    }

    function _expire(Reservation storage reservation) private {
        if (block.number > reservation.leavingUntil && reservation.leaving != 0) {
            reservation.amount -= reservation.leaving;
            reservation.leaving = 0;
        }
    }
}
