// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IERC20} from "@openzeppelin/contracts/token/ERC20/IERC20.sol";
import {ReentrancyGuardTransient} from "@openzeppelin/contracts/utils/ReentrancyGuardTransient.sol";
import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";
import {Checkpoints} from "@openzeppelin/contracts/utils/structs/Checkpoints.sol";
import {IStakeRegistry} from "./IStakeRegistry.sol";
import {Roles} from "./Roles.sol";
import {Tokens} from "./Tokens.sol";
import {TooEarly, TooLong, Unauthorized, WrongRole, ZeroValue} from "./Errors.sol";

/// @title Stake registry
/// @notice Holds the sum of all bonded and unbonding stake, nothing else. Bonded stake is kept with its history, so
/// votes can be weighed by a past block: stake that moves between accounts never counts twice in one vote.
contract StakeRegistry is IStakeRegistry, ReentrancyGuardTransient {
    using Checkpoints for Checkpoints.Trace208;
    using SafeCast for uint256;

    struct Unbonding {
        uint192 amount;
        uint64 releaseBlock;
    }

    uint256 private constant RECORD_BYTES_MAX = 1024;
    uint256 private constant BPS = 10_000;

    /// @inheritdoc IStakeRegistry
    IERC20 public immutable token;
    /// @inheritdoc IStakeRegistry
    uint64 public immutable unbondBlocks;
    /// @inheritdoc IStakeRegistry
    address public immutable court;

    /// @inheritdoc IStakeRegistry
    mapping(address account => uint8) public roleOf;
    mapping(address account => Unbonding) private _unbonding;
    mapping(address account => Checkpoints.Trace208) private _bonded;
    mapping(uint8 role => Checkpoints.Trace208) private _totals;

    /// @param token_ the one token of stake, escrow and bonds
    /// @param unbondBlocks_ longest an epoch and its settlement may take, for any task
    /// @param court_ address the Court will have; `TaskBook` checks the wiring when it is deployed
    constructor(IERC20 token_, uint64 unbondBlocks_, address court_) {
        if (address(token_) == address(0) || unbondBlocks_ == 0 || court_ == address(0)) revert ZeroValue();
        token = token_;
        unbondBlocks = unbondBlocks_;
        court = court_;
    }

    modifier onlyRegistered() {
        if (roleOf[msg.sender] == Roles.NONE) revert WrongRole(msg.sender, Roles.NONE);
        _;
    }

    /// @inheritdoc IStakeRegistry
    function register(uint8 role, bytes32 networkKey, bytes calldata record, uint256 amount) external nonReentrant {
        uint8 present = roleOf[msg.sender];
        if (present != Roles.NONE) revert AlreadyRegistered(msg.sender, present);
        if (role < Roles.NODE || role > Roles.TRAINER) revert UnknownRole(role);
        if (networkKey == 0) revert ZeroValue();
        _checkRecord(record);
        roleOf[msg.sender] = role;
        Tokens.pull(token, msg.sender, amount);
        _setBonded(msg.sender, amount);
        emit ParticipantRegistered(msg.sender, role, networkKey, record, amount);
    }

    /// @inheritdoc IStakeRegistry
    function setRecord(bytes calldata record) external onlyRegistered {
        _checkRecord(record);
        emit RecordChanged(msg.sender, record);
    }

    /// @inheritdoc IStakeRegistry
    function addStake(uint256 amount) external nonReentrant onlyRegistered {
        if (amount == 0) revert ZeroValue();
        Tokens.pull(token, msg.sender, amount);
        _setBonded(msg.sender, bondedOf(msg.sender) + amount);
        _emitStake(msg.sender);
    }

    /// @inheritdoc IStakeRegistry
    function startUnbond(uint256 amount) external nonReentrant onlyRegistered {
        if (amount == 0) revert ZeroValue();
        uint256 bonded = bondedOf(msg.sender);
        if (amount > bonded) revert UnbondTooMuch(amount, bonded);
        _setBonded(msg.sender, bonded - amount);
        Unbonding storage unbonding = _unbonding[msg.sender];
        unbonding.amount = (unbonding.amount + amount).toUint192();
        unbonding.releaseBlock = (block.number + unbondBlocks).toUint64();
        _emitStake(msg.sender);
    }

    /// @inheritdoc IStakeRegistry
    function withdraw() external nonReentrant {
        Unbonding memory unbonding = _unbonding[msg.sender];
        if (unbonding.amount == 0) revert NothingUnbonding(msg.sender);
        if (block.number < unbonding.releaseBlock) revert TooEarly(block.number, unbonding.releaseBlock);
        delete _unbonding[msg.sender];
        _emitStake(msg.sender);
        Tokens.push(token, msg.sender, unbonding.amount);
    }

    /// @inheritdoc IStakeRegistry
    function slash(address account, bytes32 task, uint256 bps) external nonReentrant {
        if (msg.sender != court) revert Unauthorized(msg.sender, court);
        if (bps > BPS) revert SlashTooMuch(bps, BPS);
        uint256 bonded = bondedOf(account);
        uint192 unbonding = _unbonding[account].amount;
        uint256 fromBonded = (bonded * bps) / BPS;
        uint256 fromUnbonding = (uint256(unbonding) * bps) / BPS;
        if (fromBonded != 0) _setBonded(account, bonded - fromBonded);
        if (fromUnbonding != 0) _unbonding[account].amount = (unbonding - fromUnbonding).toUint192();
        emit Slashed(account, task, fromBonded + fromUnbonding);
        _emitStake(account);
        Tokens.burn(token, fromBonded + fromUnbonding);
    }

    /// @inheritdoc IStakeRegistry
    function bondedOf(address account) public view returns (uint256) {
        return _bonded[account].latest();
    }

    /// @inheritdoc IStakeRegistry
    function unbondingOf(address account) external view returns (uint256 amount, uint256 releaseBlock) {
        Unbonding memory unbonding = _unbonding[account];
        return (unbonding.amount, unbonding.releaseBlock);
    }

    /// @inheritdoc IStakeRegistry
    function totalBonded(uint8 role) external view returns (uint256) {
        return _totals[role].latest();
    }

    /// @inheritdoc IStakeRegistry
    function bondedAt(address account, uint256 blockNumber) external view returns (uint256) {
        return _bonded[account].upperLookupRecent(_past(blockNumber));
    }

    /// @inheritdoc IStakeRegistry
    function totalBondedAt(uint8 role, uint256 blockNumber) external view returns (uint256) {
        return _totals[role].upperLookupRecent(_past(blockNumber));
    }

    function _setBonded(address account, uint256 bonded) private {
        uint48 here = block.number.toUint48();
        uint8 role = roleOf[account];
        uint256 total = _totals[role].latest() + bonded - _bonded[account].latest();
        _bonded[account].push(here, bonded.toUint208());
        _totals[role].push(here, total.toUint208());
    }

    function _emitStake(address account) private {
        emit StakeChanged(account, bondedOf(account), _unbonding[account].amount);
    }

    function _checkRecord(bytes calldata record) private pure {
        if (record.length > RECORD_BYTES_MAX) revert TooLong(record.length, RECORD_BYTES_MAX);
    }

    /// @dev The present block is not over: its stakes can still change.
    function _past(uint256 blockNumber) private view returns (uint48) {
        if (blockNumber >= block.number) revert TooEarly(block.number, blockNumber + 1);
        return blockNumber.toUint48();
    }
}
