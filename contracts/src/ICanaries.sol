// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IStakeRegistry} from "./IStakeRegistry.sol";
import {ITaskBook} from "./ITaskBook.sol";

/// @title Canaries: work with a defect made on purpose, to see whether verifiers look
/// @notice A canary is sealed before its round's audit beacon and opened after the round's reveals, so that nothing tells it
/// apart while it is judged. What follows from it is computed from these events, and voted for with the epoch's settlement.
interface ICanaries {
    /// @notice `sealHash` is keccak256(abi.encode(task, round, node, salt)); `sealer` has put `bond` behind it.
    event CanarySealed(bytes32 indexed sealHash, address indexed sealer, uint256 bond);
    /// @notice The submission of `node` was a canary, sealed in block `sealedBlock`.
    event CanaryOpened(
        bytes32 indexed task, uint64 indexed round, address indexed node, uint64 sealedBlock, uint256 bond
    );
    /// @notice A verifier judged an opened canary. Readers count it if the verifier was not drawn for the round.
    event CanaryVoted(
        bytes32 indexed task, uint64 indexed round, address indexed node, address verifier, bool defective
    );

    /// @notice The hash is sealed already, by this account. One that was copied is of no use to either: seal another.
    error SealTaken(address sealer);
    /// @notice Nobody sealed this hash: the task, round, account or salt is another one, or it was opened already.
    error NothingSealed(bytes32 sealHash);
    /// @notice It was sealed when the round's audit beacon could be known.
    error SealedTooLate(uint256 sealedBlock, uint256 auditBlock);
    error NotOpened(bytes32 task, uint64 round, address node);
    error AlreadyConfirmed(address verifier);
    error NoBondToWithdraw(address account);

    /// @notice Seals a canary. Anybody may, for any node. A seal that is not opened keeps its bond for ever.
    /// @param sealHash keccak256(abi.encode(task, round, node, salt))
    /// @param bond in the stake token; one below what a slash would take of the node does not protect it from the slash
    function seal(bytes32 sealHash, uint256 bond) external;

    /// @notice The node opens its canary, after the round's reveal deadline and up to `openingDeadline`.
    /// @dev The bond waits for its sealer in `bondOf`.
    function open(bytes32 task, uint64 round, bytes32 salt) external;

    /// @notice A verifier says whether an opened canary is defective, once, up to the round's `confirmDeadline`.
    function confirm(bytes32 task, uint64 round, address node, bool defective) external;

    /// @notice Pays the caller the bonds of its opened seals.
    function withdraw() external;

    function registry() external view returns (IStakeRegistry);
    function book() external view returns (ITaskBook);
    /// @notice Who sealed a hash, with what bond, in which block. Zeros for none, and for one that was opened.
    function sealOf(bytes32 sealHash) external view returns (address sealer, uint96 bond, uint64 sealedBlock);
    function isOpened(bytes32 task, uint64 round, address node) external view returns (bool);
    function hasConfirmed(bytes32 task, uint64 round, address node, address verifier) external view returns (bool);
    function bondOf(address account) external view returns (uint256);
}
