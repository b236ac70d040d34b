// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {ERC20} from "@openzeppelin/contracts/token/ERC20/ERC20.sol";
import {ERC20Permit} from "@openzeppelin/contracts/token/ERC20/extensions/ERC20Permit.sol";

/// @title Play money for devnets and tests
/// @notice Anybody mints: worthless by construction. A real deployment names an existing token.
contract DevToken is ERC20Permit {
    constructor() ERC20("Troth devnet token", "DEV") ERC20Permit("Troth devnet token") {}

    /// @notice Makes `amount` out of nothing.
    function mint(address to, uint256 amount) external {
        _mint(to, amount);
    }
}
