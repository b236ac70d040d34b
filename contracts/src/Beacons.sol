// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IBeacons} from "./IBeacons.sol";

/// @title Block hashes as beacons
/// @notice Assumption, stated: a block proposer can discard a beacon by forgoing its block.
contract Beacons is IBeacons {
    /// @inheritdoc IBeacons
    mapping(uint64 blockNumber => bytes32) public hashOf;

    /// @inheritdoc IBeacons
    function record(uint64 blockNumber) external {
        if (hashOf[blockNumber] != 0) return;
        bytes32 blockHash = blockhash(blockNumber);
        if (blockHash == 0) revert BeaconOutOfReach(blockNumber, block.number);
        hashOf[blockNumber] = blockHash;
        emit BeaconRecorded(blockNumber, blockHash);
    }
}
