// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IERC20} from "@openzeppelin/contracts/token/ERC20/IERC20.sol";
import {SafeERC20} from "@openzeppelin/contracts/token/ERC20/utils/SafeERC20.sol";
import {TransferAmountWrong} from "./Errors.sol";

/// @title Exact token movements
/// @notice Money comes in exactly as stated or not at all, so what the ledger's books say is what it holds.
library Tokens {
    using SafeERC20 for IERC20;

    /// @dev Nobody holds its key. Not the zero address, which many tokens refuse.
    address internal constant BURN_ADDRESS = 0x000000000000000000000000000000000000dEaD;

    /// @notice Moves exactly `amount` from `from` to this contract.
    function pull(IERC20 token, address from, uint256 amount) internal {
        if (amount == 0) return;
        uint256 balanceBefore = token.balanceOf(address(this));
        token.safeTransferFrom(from, address(this), amount);
        uint256 received = token.balanceOf(address(this)) - balanceBefore;
        if (received != amount) revert TransferAmountWrong(amount, received);
    }

    /// @notice Moves `amount` from this contract to `to`.
    function push(IERC20 token, address to, uint256 amount) internal {
        if (amount != 0) token.safeTransfer(to, amount);
    }

    /// @notice Takes `amount` out of circulation.
    function burn(IERC20 token, uint256 amount) internal {
        push(token, BURN_ADDRESS, amount);
    }
}
