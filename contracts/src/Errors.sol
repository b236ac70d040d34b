// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

// Errors that more than one contract of the ledger raises. Each carries what was seen and what is needed.

/// @notice The caller may not do this.
error Unauthorized(address caller, address needed);

/// @notice `account` has this role (0: it is not registered), which is not one that may do this.
error WrongRole(address account, uint8 role);

/// @notice `account` has less bonded stake than the task asks for.
error StakeTooLow(address account, uint256 bonded, uint256 needed);

/// @notice The step is first accepted in block `firstBlock`.
error TooEarly(uint256 blockNumber, uint256 firstBlock);

/// @notice The step was last accepted in block `lastBlock`.
error TooLate(uint256 blockNumber, uint256 lastBlock);

/// @notice The hash of this block is not recorded: call `Beacons.record` first. A missed beacon is never replaced.
error BeaconMissing(uint256 blockNumber);

/// @notice The token moved another amount than asked for, as tokens with a transfer fee do: they are refused.
error TransferAmountWrong(uint256 expected, uint256 received);

/// @notice A list or byte string is longer than the ledger reads.
error TooLong(uint256 length, uint256 limit);

/// @notice An amount, hash, key or address that must not be zero is zero.
error ZeroValue();
