// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

/// @title Block hashes, kept from oblivion
interface IBeacons {
    /// @notice The hash of block `blockNumber`, recorded while the chain still knew it.
    event BeaconRecorded(uint64 indexed blockNumber, bytes32 blockHash);

    /// @notice The chain has no hash for this block: it is not over yet, or more than 256 blocks ago.
    error BeaconOutOfReach(uint64 blockNumber, uint256 currentBlock);

    /// @notice Keeps the hash of a block of the last 256. Anybody may; nothing happens when it is kept already.
    function record(uint64 blockNumber) external;

    /// @notice The kept hash, zero when there is none.
    function hashOf(uint64 blockNumber) external view returns (bytes32);
}
