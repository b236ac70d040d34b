// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {ERC20} from "@openzeppelin/contracts/token/ERC20/ERC20.sol";

/// @notice What a contract must offer to be told of transfers by `HookToken`.
interface ITokenHook {
    function onTokenMoved() external;
}

/// @title A token that calls sender and receiver in the middle of a transfer, as ERC-777 does
contract HookToken is ERC20 {
    constructor() ERC20("Hook", "HOOK") {}

    function mint(address to, uint256 amount) external {
        _mint(to, amount);
    }

    function _update(address from, address to, uint256 value) internal override {
        if (from.code.length != 0 && from != msg.sender) ITokenHook(from).onTokenMoved();
        super._update(from, to, value);
        if (to.code.length != 0 && to != msg.sender) ITokenHook(to).onTokenMoved();
    }
}

/// @title A token that keeps 1 % of every transfer
contract FeeToken is ERC20 {
    constructor() ERC20("Fee", "FEE") {}

    function mint(address to, uint256 amount) external {
        _mint(to, amount);
    }

    function _update(address from, address to, uint256 value) internal override {
        if (from != address(0) && to != address(0)) {
            super._update(from, address(0), value / 100);
            value -= value / 100;
        }
        super._update(from, to, value);
    }
}

/// @title A token that answers false instead of reverting, and moves nothing
contract FalseToken {
    mapping(address account => uint256) public balanceOf;

    function mint(address to, uint256 amount) external {
        balanceOf[to] += amount;
    }

    function approve(address, uint256) external pure returns (bool) {
        return true;
    }

    function transfer(address, uint256) external pure returns (bool) {
        return false;
    }

    function transferFrom(address, address, uint256) external pure returns (bool) {
        return false;
    }
}

/// @title A token whose issuer can freeze accounts, as issuers of stable coins do
contract FreezeToken is ERC20 {
    mapping(address account => bool) public isFrozen;

    error Frozen(address account);

    constructor() ERC20("Freeze", "FRZ") {}

    function mint(address to, uint256 amount) external {
        _mint(to, amount);
    }

    function freeze(address account, bool frozen) external {
        isFrozen[account] = frozen;
    }

    function _update(address from, address to, uint256 value) internal override {
        if (isFrozen[from]) revert Frozen(from);
        if (isFrozen[to]) revert Frozen(to);
        super._update(from, to, value);
    }
}
