// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IERC20} from "@openzeppelin/contracts/token/ERC20/IERC20.sol";

/// @title Who takes part, in which role, with how much at stake
/// @notice Registration, record and stake are the account's own business; only the Court takes stake away.
interface IStakeRegistry {
    /// @notice An account bound a network key and a role and bonded its first stake.
    event ParticipantRegistered(address indexed account, uint8 role, bytes32 networkKey, bytes record, uint256 bonded);
    /// @notice A new signed node record.
    event RecordChanged(address indexed account, bytes record);
    /// @notice Totals after a top-up, an unbonding, a withdrawal or a slash.
    event StakeChanged(address indexed account, uint256 bonded, uint256 unbonding);
    /// @notice `amount` was taken from bonded and unbonding stake and burned, on behalf of `task`.
    event Slashed(address indexed account, bytes32 indexed task, uint256 amount);

    /// @notice The account has this role already, for ever.
    error AlreadyRegistered(address account, uint8 role);
    /// @notice There is no such role.
    error UnknownRole(uint8 role);
    /// @notice More than is bonded.
    error UnbondTooMuch(uint256 amount, uint256 bonded);
    /// @notice Nothing is unbonding.
    error NothingUnbonding(address account);
    /// @notice More than the whole.
    error SlashTooMuch(uint256 bps, uint256 limit);

    /// @notice Registers the caller. The network key is bound by the record's signature, which readers check: copying
    /// a key gains nothing.
    /// @param role see `Roles`
    /// @param networkKey Ed25519 public key
    /// @param record signed node record, at most 1024 bytes
    /// @param amount first stake, may be 0: each task states its own minimum
    function register(uint8 role, bytes32 networkKey, bytes calldata record, uint256 amount) external;

    /// @notice Publishes a new node record of the caller.
    function setRecord(bytes calldata record) external;

    /// @notice Bonds more.
    function addStake(uint256 amount) external;

    /// @notice Starts to unbond `amount`. All that is unbonding forms one sum, released `unbondBlocks` after the
    /// latest start. It can be slashed until it is withdrawn.
    function startUnbond(uint256 amount) external;

    /// @notice Pays out what is unbonding, from its release block on.
    function withdraw() external;

    /// @notice Burns `bps`/10000 of bonded and of unbonding stake (floor). Only the Court; never fails for lack of stake.
    function slash(address account, bytes32 task, uint256 bps) external;

    function token() external view returns (IERC20);
    function unbondBlocks() external view returns (uint64);
    function court() external view returns (address);
    /// @notice Role of an account, 0 when it is not registered.
    function roleOf(address account) external view returns (uint8);
    function bondedOf(address account) external view returns (uint256);
    /// @notice What is unbonding, and the first block in which it can be withdrawn.
    function unbondingOf(address account) external view returns (uint256 amount, uint256 releaseBlock);
    /// @notice Bonded stake of all accounts of a role.
    function totalBonded(uint8 role) external view returns (uint256);
    /// @notice Bonded stake of an account at the end of a past block.
    function bondedAt(address account, uint256 blockNumber) external view returns (uint256);
    /// @notice Bonded stake of a role at the end of a past block.
    function totalBondedAt(uint8 role, uint256 blockNumber) external view returns (uint256);
}
