// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

/// @title What a registered account does
/// @notice One account has one role, for ever. The numbers are on the ledger: never renumber, only append.
library Roles {
    uint8 internal constant NONE = 0;
    uint8 internal constant NODE = 1;
    uint8 internal constant VERIFIER = 2;
    uint8 internal constant RELAY = 3;
    uint8 internal constant TRAINER = 4;
}
