// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {ReentrancyGuardTransient} from "@openzeppelin/contracts/utils/ReentrancyGuardTransient.sol";
import {MerkleProof} from "@openzeppelin/contracts/utils/cryptography/MerkleProof.sol";
import {Math} from "@openzeppelin/contracts/utils/math/Math.sol";
import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";
import {ICourt} from "./ICourt.sol";
import {ITaskBook} from "./ITaskBook.sol";
import {TaskStore} from "./TaskStore.sol";
import {Terms, TermsLib} from "./Terms.sol";
import {Tokens} from "./Tokens.sol";
import {TooEarly, TooLong, Unauthorized, ZeroValue} from "./Errors.sol";

/// @title The money of `TaskBook`: publish, top up, cancel, settle, claim, close
/// @notice Every movement changes `remaining` and exactly one of deposit, paid, refunded and burned, before tokens move
/// out and after they moved in.
abstract contract TaskEscrow is TaskStore, ReentrancyGuardTransient {
    using SafeCast for uint256;
    using TermsLib for Terms;

    uint256 internal constant LIST_MAX = 256;
    uint256 private constant SPEC_BYTES_MAX = 4096;

    /// @inheritdoc ITaskBook
    function publish(Terms calldata terms, bytes calldata spec, uint256 deposit)
        external
        nonReentrant
        returns (bytes32 task)
    {
        if (spec.length == 0) revert ZeroValue();
        if (spec.length > SPEC_BYTES_MAX) revert TooLong(spec.length, SPEC_BYTES_MAX);
        TermsLib.check(terms, registry.unbondBlocks());
        if (deposit < terms.epochPayMax) revert DepositBelowOneEpoch(deposit, terms.epochPayMax);
        task = keccak256(
            abi.encode(block.chainid, address(this), msg.sender, nonceOf[msg.sender]++, keccak256(spec))
        );
        Tokens.pull(token, msg.sender, deposit);
        Task storage t = _tasks[task];
        t.initiator = msg.sender;
        t.startBlock = (block.number + terms.startDelayBlocks).toUint64();
        t.terms = terms;
        t.deposit = deposit.toUint128();
        t.remaining = t.deposit;
        t.endRound = _fundedRounds(t);
        emit TaskPublished(task, msg.sender, t.startBlock, deposit, spec);
        emit PolicyRecorded(task, 0, terms.basePolicy, terms.baseManifest, 0, 0);
    }

    /// @inheritdoc ITaskBook
    function topUp(bytes32 task, uint256 amount) external nonReentrant {
        Task storage t = _open(task);
        if (t.cancelled) revert TaskIsCancelled(task);
        if (amount == 0) revert ZeroValue();
        Tokens.pull(token, msg.sender, amount);
        t.deposit = (t.deposit + amount).toUint128();
        t.remaining = (t.remaining + amount).toUint128();
        t.endRound = _fundedRounds(t);
        emit TaskToppedUp(task, t.deposit);
    }

    /// @inheritdoc ITaskBook
    function cancel(bytes32 task) external {
        Task storage t = _open(task);
        if (msg.sender != t.initiator) revert Unauthorized(msg.sender, t.initiator);
        if (t.cancelled) revert TaskIsCancelled(task);
        uint256 nextRound = uint256(t.terms.nextEpoch(t.startBlock)) * t.terms.epochRounds;
        if (nextRound < t.endRound) t.endRound = nextRound.toUint64();
        t.cancelled = true;
        emit TaskCancelled(task, t.endRound);
    }

    /// @inheritdoc ITaskBook
    function settle(bytes32 task, uint64 epoch, bytes32 root, uint256 paidTotal, uint256 burnedTotal)
        external
        nonReentrant
    {
        if (msg.sender != court) revert Unauthorized(msg.sender, court);
        checkSettlement(task, epoch, paidTotal, burnedTotal);
        Task storage t = _tasks[task];
        uint128 burnNow = (burnedTotal - t.burnedTotal).toUint128();
        t.settledEpochs = epoch + 1;
        t.root = root;
        t.paidTotal = paidTotal.toUint128();
        t.burnedTotal += burnNow;
        t.burned += burnNow;
        t.remaining -= burnNow;
        t.pendingPay -= _pendingPay[task][epoch];
        delete _pendingPay[task][epoch];
        Tokens.burn(token, burnNow);
    }

    /// @inheritdoc ITaskBook
    function claim(bytes32 task, address account, uint256 cumulative, bytes32[] calldata proof) external nonReentrant {
        Task storage t = _known(task);
        if (_claim(t, task, account, cumulative, proof) == 0) revert NothingToClaim(claimedOf[task][account]);
    }

    /// @inheritdoc ITaskBook
    function claimMany(
        bytes32 task,
        address[] calldata accounts,
        uint256[] calldata cumulatives,
        bytes32[][] calldata proofs
    ) external nonReentrant {
        if (accounts.length != cumulatives.length || accounts.length != proofs.length) {
            revert LengthMismatch(accounts.length, cumulatives.length, proofs.length);
        }
        if (accounts.length > LIST_MAX) revert TooLong(accounts.length, LIST_MAX);
        Task storage t = _known(task);
        for (uint256 i = 0; i < accounts.length; ++i) {
            _claim(t, task, accounts[i], cumulatives[i], proofs[i]);
        }
    }

    /// @inheritdoc ITaskBook
    function close(bytes32 task) external nonReentrant {
        Task storage t = _open(task);
        if (ICourt(court).isPending(task)) revert SettlementIsPending(task);
        uint256 endEpoch = t.endRound / t.terms.epochRounds;
        uint256 timeoutBlock = t.terms.lastConfirm(t.startBlock, t.endRound) + t.terms.timeoutBlocks;
        if (t.settledEpochs < endEpoch && block.number <= timeoutBlock) {
            revert NotClosable(t.settledEpochs, endEpoch, timeoutBlock);
        }
        uint128 free = t.remaining - (t.paidTotal - t.paid); // what is settled and unclaimed stays
        uint128 burned = Math.min(t.pendingPay, free).toUint128();
        uint128 refunded = free - burned;
        t.closed = true;
        t.pendingPay = 0;
        t.burned += burned;
        t.refunded = refunded;
        t.remaining -= free;
        emit TaskClosed(task, refunded, burned);
        Tokens.burn(token, burned);
        Tokens.push(token, t.initiator, refunded);
    }

    /// @inheritdoc ITaskBook
    function checkSettlement(bytes32 task, uint64 epoch, uint256 paidTotal, uint256 burnedTotal) public view {
        Task storage t = _open(task);
        if (epoch != t.settledEpochs) revert WrongEpoch(epoch, t.settledEpochs);
        uint256 endEpoch = t.endRound / t.terms.epochRounds;
        if (epoch >= endEpoch) revert PastTheEnd(epoch, endEpoch);
        uint256 lastConfirm = lastConfirmOf(task, epoch);
        if (block.number <= lastConfirm) revert TooEarly(block.number, lastConfirm + 1);
        if (paidTotal < t.paidTotal || burnedTotal < t.burnedTotal) {
            revert TotalsShrink(paidTotal, burnedTotal, t.paidTotal, t.burnedTotal);
        }
        if (paidTotal > t.deposit || burnedTotal > t.deposit - paidTotal) {
            revert SettlementAboveDeposit(paidTotal, burnedTotal, t.deposit);
        }
    }

    /// @dev Remembers the maximal pay of receipted leaves, to be burned if nobody ever judges them. An epoch cannot cost
    /// more than `epochPayMax`, however many nodes joined, so the rest of the deposit stays refundable.
    function _addPendingPay(Task storage t, bytes32 task, uint64 epoch, uint256 amount) internal {
        uint128 before = _pendingPay[task][epoch];
        uint128 present = Math.min(before + amount, t.terms.epochPayMax).toUint128();
        _pendingPay[task][epoch] = present;
        t.pendingPay += present - before;
    }

    /// @return due what was paid out, 0 when nothing was due
    function _claim(Task storage t, bytes32 task, address account, uint256 cumulative, bytes32[] calldata proof)
        private
        returns (uint256 due)
    {
        // Hashed twice, so that no inner node of the tree reads as a leaf.
        bytes32 leaf = keccak256(bytes.concat(keccak256(abi.encode(task, account, cumulative))));
        if (!MerkleProof.verifyCalldata(proof, t.root, leaf)) revert BadProof(account, cumulative);
        uint256 before = claimedOf[task][account];
        if (cumulative <= before) return 0;
        due = cumulative - before;
        uint256 claimedTotal = t.paid + due;
        if (claimedTotal > t.paidTotal) revert ClaimAboveSettled(claimedTotal, t.paidTotal);
        claimedOf[task][account] = cumulative;
        t.paid = claimedTotal.toUint128();
        t.remaining -= due.toUint128();
        emit Claimed(task, account, due, cumulative);
        Tokens.push(token, account, due);
    }

    function _fundedRounds(Task storage t) private view returns (uint64) {
        uint256 epochs = Math.min(t.terms.numEpochs, t.deposit / t.terms.epochPayMax);
        return (epochs * t.terms.epochRounds).toUint64();
    }
}
