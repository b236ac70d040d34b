// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {ITokenHook} from "./HostileTokens.sol";

/// @title An account that is a contract, and calls back into the ledger whenever its tokens move
contract Reenterer is ITokenHook {
    address private _target;
    bytes private _data;
    /// @notice Calls made from within a transfer, those that succeeded, and the last error data.
    uint256 public numTried;
    uint256 public numSucceeded;
    bytes public lastError;

    /// @notice What to call from within transfers; nothing when `target` is zero.
    function arm(address target, bytes calldata data) external {
        _target = target;
        _data = data;
    }

    /// @notice Calls anything as this account, and passes errors on.
    function execute(address target, bytes calldata data) external returns (bytes memory) {
        return _forward(target, data);
    }

    /// @notice Makes two calls in one transaction.
    function executeTwice(address target, bytes calldata first, bytes calldata second) external {
        _forward(target, first);
        _forward(target, second);
    }

    /// @inheritdoc ITokenHook
    function onTokenMoved() external {
        if (_target == address(0)) return;
        ++numTried;
        (bool ok, bytes memory result) = _target.call(_data);
        if (ok) ++numSucceeded;
        else lastError = result;
    }

    function _forward(address target, bytes calldata data) private returns (bytes memory) {
        (bool ok, bytes memory result) = target.call(data);
        if (!ok) {
            assembly ("memory-safe") {
                revert(add(result, 32), mload(result))
            }
        }
        return result;
    }
}
