// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IERC20} from "@openzeppelin/contracts/token/ERC20/IERC20.sol";
import {ReentrancyGuardTransient} from "@openzeppelin/contracts/utils/ReentrancyGuardTransient.sol";
import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";
import {ICanaries} from "./ICanaries.sol";
import {IStakeRegistry} from "./IStakeRegistry.sol";
import {ITaskBook} from "./ITaskBook.sol";
import {Roles} from "./Roles.sol";
import {RoundTimes} from "./Terms.sol";
import {Tokens} from "./Tokens.sol";
import {StakeTooLow, TooEarly, TooLate, WrongRole, ZeroValue} from "./Errors.sol";

/// @title Canaries
/// @notice Holds the bonds of seals, nothing else, and has no power over any other contract. Each seal, opening and vote
/// costs its sender the storage it takes; no loop runs over any of them.
contract Canaries is ICanaries, ReentrancyGuardTransient {
    using SafeCast for uint256;

    struct Seal {
        address sealer;
        uint96 bond;
        uint64 sealedBlock; // 0: never sealed; it stays when the seal is opened, so a hash is sealed once
    }

    /// @inheritdoc ICanaries
    IStakeRegistry public immutable registry;
    /// @inheritdoc ICanaries
    ITaskBook public immutable book;
    IERC20 private immutable _token;

    mapping(bytes32 sealHash => Seal) private _seals;
    /// @inheritdoc ICanaries
    mapping(bytes32 task => mapping(uint64 round => mapping(address node => bool))) public isOpened;
    /// @inheritdoc ICanaries
    mapping(
        bytes32 task => mapping(uint64 round => mapping(address node => mapping(address verifier => bool)))
    ) public hasConfirmed;
    /// @inheritdoc ICanaries
    mapping(address account => uint256) public bondOf;

    constructor(IStakeRegistry registry_, ITaskBook book_) {
        if (address(registry_) == address(0) || address(book_) == address(0)) revert ZeroValue();
        if (address(book_.registry()) != address(registry_)) {
            revert ITaskBook.WiringMismatch(address(book_.registry()), address(registry_));
        }
        registry = registry_;
        book = book_;
        _token = registry_.token();
    }

    /// @inheritdoc ICanaries
    function seal(bytes32 sealHash, uint256 bond) external nonReentrant {
        if (sealHash == 0) revert ZeroValue();
        Seal storage s = _seals[sealHash];
        if (s.sealedBlock != 0) revert SealTaken(s.sealer);
        s.sealer = msg.sender;
        s.bond = bond.toUint96();
        s.sealedBlock = block.number.toUint64();
        emit CanarySealed(sealHash, msg.sender, bond);
        Tokens.pull(_token, msg.sender, bond);
    }

    /// @inheritdoc ICanaries
    function open(bytes32 task, uint64 round, bytes32 salt) external {
        RoundTimes memory times = book.openRound(task, round);
        if (block.number <= times.verdictRevealDeadline) {
            revert TooEarly(block.number, times.verdictRevealDeadline + 1);
        }
        if (block.number > times.openingDeadline) revert TooLate(block.number, times.openingDeadline);
        bytes32 sealHash = keccak256(abi.encode(task, round, msg.sender, salt));
        Seal memory s = _seals[sealHash];
        if (s.sealer == address(0)) revert NothingSealed(sealHash);
        if (s.sealedBlock >= times.auditBlock) revert SealedTooLate(s.sealedBlock, times.auditBlock);
        _seals[sealHash].sealer = address(0);
        _seals[sealHash].bond = 0;
        bondOf[s.sealer] += s.bond;
        // A second seal of the same submission gives its bond back and says nothing new.
        if (isOpened[task][round][msg.sender]) return;
        isOpened[task][round][msg.sender] = true;
        emit CanaryOpened(task, round, msg.sender, s.sealedBlock, s.bond);
    }

    /// @inheritdoc ICanaries
    function confirm(bytes32 task, uint64 round, address node, bool defective) external {
        RoundTimes memory times = book.openRound(task, round);
        if (block.number > times.confirmDeadline) revert TooLate(block.number, times.confirmDeadline);
        if (!isOpened[task][round][node]) revert NotOpened(task, round, node);
        uint8 role = registry.roleOf(msg.sender);
        if (role != Roles.VERIFIER) revert WrongRole(msg.sender, role);
        uint256 bonded = registry.bondedOf(msg.sender);
        uint256 needed = book.termsOf(task).verifierStakeMin;
        if (bonded < needed) revert StakeTooLow(msg.sender, bonded, needed);
        if (hasConfirmed[task][round][node][msg.sender]) revert AlreadyConfirmed(msg.sender);
        hasConfirmed[task][round][node][msg.sender] = true;
        emit CanaryVoted(task, round, node, msg.sender, defective);
    }

    /// @inheritdoc ICanaries
    function withdraw() external nonReentrant {
        uint256 amount = bondOf[msg.sender];
        if (amount == 0) revert NoBondToWithdraw(msg.sender);
        delete bondOf[msg.sender];
        Tokens.push(_token, msg.sender, amount);
    }

    /// @inheritdoc ICanaries
    function sealOf(bytes32 sealHash) external view returns (address sealer, uint96 bond, uint64 sealedBlock) {
        Seal memory s = _seals[sealHash];
        return (s.sealer, s.bond, s.sealedBlock);
    }
}
