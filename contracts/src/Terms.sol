// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

/// @notice The part of a task that the ledger enforces. Blocks and counts are plain numbers, money is in the token's
/// smallest unit. Field order is that of `protocol.task.Terms`.
struct Terms {
    uint32 startDelayBlocks; // publication to round 0
    uint32 roundBlocks; // one round's start to the next
    uint32 epochRounds;
    uint32 numEpochs;
    uint32 commitBlocks; // round start to the last block for roots
    uint32 receiptBlocks; // from there to the last block for receipts
    uint32 finalityBlocks; // from there to the audit beacon
    uint32 verdictCommitBlocks; // from there to the last block for verdict commitments
    uint32 verdictRevealBlocks; // from there to the last block for reveals
    uint32 challengeBlocks; // challenge window of a settlement, and voting window of a challenge
    uint32 timeoutBlocks; // after its last epoch can be settled, when a task may be closed unsettled
    uint32 slotsMax; // most leaves of one node in one round
    uint16 slashBps; // share of a cheat's stake that is burned, in 1/10000
    uint128 leafPayMax; // the most one leaf can earn
    uint128 epochPayMax; // the most one epoch can cost
    uint128 nodeStakeMin;
    uint128 verifierStakeMin;
    uint96 challengeBond;
    address trainer; // the account that records policies
    bytes32 basePolicy; // policy version 0
    bytes32 baseManifest;
}

/// @notice Block numbers of one round. Each deadline is the last block in which the step is accepted.
struct RoundTimes {
    uint256 start; // its hash is the round beacon
    uint256 commitDeadline;
    uint256 receiptDeadline;
    uint256 auditBlock; // its hash is the audit beacon
    uint256 verdictCommitDeadline;
    uint256 verdictRevealDeadline;
    uint256 openingDeadline; // canaries are opened
    uint256 confirmDeadline; // fresh verifiers vote on opened canaries
}

/// @title Bounds of a task's terms and the block schedule that follows from them
/// @notice All arithmetic is in 256 bits on 32-bit inputs: nothing here can overflow.
library TermsLib {
    uint256 internal constant BLOCKS_MAX = 10_000_000;
    uint256 internal constant SLOTS_MAX = 4096;
    /// @dev `blockhash` reaches back 256 blocks; this leaves some to get the recording transaction in.
    uint256 internal constant BEACON_SPAN_MAX = 249;

    /// @notice A term is outside its bounds.
    error TermOutOfRange(string name, uint256 value, uint256 low, uint256 high);

    /// @notice A round's beacons could no longer be recorded when they are needed.
    error BeaconSpanTooLong(uint256 blocks, uint256 limit);

    /// @notice Stake could be withdrawn before a settlement that slashes it is final.
    error UnbondingTooShort(uint256 unbondBlocks, uint256 needed);

    /// @notice Reverts when the terms are inconsistent in themselves or with the registry's unbonding time.
    function check(Terms calldata t, uint256 unbondBlocks) internal pure {
        _range("startDelayBlocks", t.startDelayBlocks, 1, BLOCKS_MAX);
        _range("roundBlocks", t.roundBlocks, 1, BLOCKS_MAX);
        _range("epochRounds", t.epochRounds, 1, BLOCKS_MAX);
        _range("numEpochs", t.numEpochs, 1, BLOCKS_MAX);
        _range("commitBlocks", t.commitBlocks, 1, BLOCKS_MAX);
        _range("receiptBlocks", t.receiptBlocks, 1, BLOCKS_MAX);
        _range("verdictCommitBlocks", t.verdictCommitBlocks, 1, BLOCKS_MAX);
        _range("verdictRevealBlocks", t.verdictRevealBlocks, 1, BLOCKS_MAX);
        _range("challengeBlocks", t.challengeBlocks, 1, BLOCKS_MAX);
        _range("timeoutBlocks", t.timeoutBlocks, 1, BLOCKS_MAX);
        _range("slotsMax", t.slotsMax, 1, SLOTS_MAX);
        _range("slashBps", t.slashBps, 1, 10_000);
        _range("epochPayMax", t.epochPayMax, 1, type(uint128).max);
        _range("trainer", uint160(t.trainer), 1, type(uint160).max);
        _range("basePolicy", uint256(t.basePolicy), 1, type(uint256).max);
        uint256 span = uint256(t.commitBlocks) + t.receiptBlocks + t.finalityBlocks + t.verdictCommitBlocks;
        if (span > BEACON_SPAN_MAX) revert BeaconSpanTooLong(span, BEACON_SPAN_MAX);
        // A cheat that unbonds in the first round of an epoch is slashed after the epoch's last reveal, the openings of and
        // votes on its canaries, the challenge window, and the vote on a challenge made in the window's last block.
        uint256 verdicts = 2 * uint256(t.verdictRevealBlocks) + t.verdictCommitBlocks;
        uint256 needed = uint256(t.epochRounds) * t.roundBlocks + span + verdicts + 2 * uint256(t.challengeBlocks);
        if (unbondBlocks < needed) revert UnbondingTooShort(unbondBlocks, needed);
    }

    /// @notice Deadlines of round `round` of a task whose round 0 starts at `startBlock`.
    function roundTimes(Terms storage t, uint256 startBlock, uint256 round) internal view returns (RoundTimes memory times) {
        times.start = startBlock + round * t.roundBlocks;
        times.commitDeadline = times.start + t.commitBlocks;
        times.receiptDeadline = times.commitDeadline + t.receiptBlocks;
        times.auditBlock = times.receiptDeadline + t.finalityBlocks;
        times.verdictCommitDeadline = times.auditBlock + t.verdictCommitBlocks;
        times.verdictRevealDeadline = times.verdictCommitDeadline + t.verdictRevealBlocks;
        times.openingDeadline = times.verdictRevealDeadline + t.verdictRevealBlocks;
        times.confirmDeadline = times.openingDeadline + t.verdictCommitBlocks; // as long as a committee has
    }

    /// @notice Last reveal deadline of the last of `numRounds` rounds; the block before the start for none.
    function lastReveal(Terms storage t, uint256 startBlock, uint256 numRounds) internal view returns (uint256) {
        if (numRounds == 0) return startBlock - 1;
        return roundTimes(t, startBlock, numRounds - 1).verdictRevealDeadline;
    }

    /// @notice Last block in which anything can be said about the first `numRounds` rounds: they can be settled after it.
    function lastConfirm(Terms storage t, uint256 startBlock, uint256 numRounds) internal view returns (uint256) {
        return lastReveal(t, startBlock, numRounds) + t.verdictRevealBlocks + t.verdictCommitBlocks;
    }

    /// @notice First epoch whose round beacons are all unknown still: 0 before the start, else the one after the present.
    function nextEpoch(Terms storage t, uint256 startBlock) internal view returns (uint64) {
        if (block.number < startBlock) return 0;
        uint256 epoch = (block.number - startBlock) / t.roundBlocks / t.epochRounds + 1;
        return uint64(epoch); // a quotient of block numbers
    }

    function _range(string memory name, uint256 value, uint256 low, uint256 high) private pure {
        if (value < low || value > high) revert TermOutOfRange(name, value, low, high);
    }
}
