"""Compiled Gumbel-max over a large vocabulary: noise is made only for tokens that can still win, exact scores for fewer still.

The score of token v is z = l/T - log(E), E = -log(u) (protocol.sampling). So argmax z = argmin E/w with
w = exp((l - max l) / T), and since E >= 1 - u, a token can beat a known one, b, only if

    1 - u_v <= (E_b / w_b) * w_v.                                                                                     (1)

Both sides are compared as logarithms to base 2 in float32, the left one from below: the bit pattern of a positive float,
read as an integer and scaled, is its logarithm with the mantissa's part replaced by its chord. `SLACK` is far above
every float32 error in the range where the comparison can go either way, so no winner is ever passed over; tokens that
are let through for nothing only cost their logarithm. A close race is not decided here either: rows whose two best scores
are closer than `MARGIN`, which is far above the float64 error of a score, go back to the caller.

The largest noise there is has 1 - u = 2^-33 (its word is 2^32 - 1). So where the right side of (1) is below 2^-33, no word
whatever lets the token win, and none is made: with a mean noise of 0.58 a token more than about 22 below the others in l/T.
The right side is compared with `FLOOR` in the same units and with the same `SLACK`, which again errs on the side of making a
word. Chunks are looked at with that of the highest logit first, because (1) is as tight as the best score so far; the order
changes nothing, as the best score is a maximum and rows in which two are equal, or nearly so, are not decided here.
"""
# Numba infers the types of what it compiles; the signatures of the kernels state them.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="assignment,unused-ignore"

from __future__ import annotations

import math

import numpy as np

from protocol.kernels.compiling import compiled

#: Tokens looked at together; their noise words and bounds stay in the first-level cache.
CHUNK = 256
BLOCKS = CHUNK // 4
#: Added to the right side of the comparison, in units of log2. Float32 errors there are below 1e-4.
SLACK = 1e-2
#: Scores closer than this are a close race. Errors of a score are below 1e-9 while |max l / T| <= PEAK_MAX.
MARGIN = 1e-8
PEAK_MAX = float(1 << 20)
#: log2(1 - u) of the largest noise in the units of the comparison: 31 for the halved word, 127 for the exponent's bias.
FLOOR = np.float32((-33.0 + 31.0 + 127.0) * (1 << 23))
#: Once most blocks of a chunk need their words, as many chunks are not looked at before theirs are made.
DENSE = 7
#: Row flags.
CLOSE = 1
NON_FINITE = 2

_M0 = np.uint64(0xD2511F53)
_M1 = np.uint64(0xCD9E8D57)
_W0 = np.uint64(0x9E3779B9)
_W1 = np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_LOG2_E = 1.0 / math.log(2.0)
_MANTISSA = float(1 << 23)


@compiled(inline="always")
def _round(c0, c1, c2, c3, k0, k1):
    """One round. Of each 64-bit value only the low half means anything: a product takes no more, so nothing need be cleared
    between rounds, and a vector of products is one instruction."""
    p0, p1 = (c0 & _LOW) * _M0, (c2 & _LOW) * _M1
    return (p1 >> _SHIFT) ^ c1 ^ k0, p1, (p0 >> _SHIFT) ^ c3 ^ k1, p0


@compiled()
def _fill_words(words, blocks, count, low, high, position):
    """Philox4x32-10 words of the counters (blocks[j], position, 0, 0), j < count, at words[lane, j].

    The rounds are written out: a loop over blocks is compiled to vectors only if it has no loop inside.
    """
    a, b = low, high
    a1, b1 = a + _W0, b + _W1
    a2, b2 = a1 + _W0, b1 + _W1
    a3, b3 = a2 + _W0, b2 + _W1
    a4, b4 = a3 + _W0, b3 + _W1
    a5, b5 = a4 + _W0, b4 + _W1
    a6, b6 = a5 + _W0, b5 + _W1
    a7, b7 = a6 + _W0, b6 + _W1
    a8, b8 = a7 + _W0, b7 + _W1
    a9, b9 = a8 + _W0, b8 + _W1
    zero = np.uint64(0)
    for j in range(count):
        c0, c1, c2, c3 = _round(np.uint64(blocks[j]), position, zero, zero, a, b)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a1, b1)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a2, b2)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a3, b3)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a4, b4)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a5, b5)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a6, b6)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a7, b7)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a8, b8)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a9, b9)
        words[0, j] = np.uint32(c0)
        words[1, j] = np.uint32(c1)
        words[2, j] = np.uint32(c2)
        words[3, j] = np.uint32(c3)


@compiled()
def _find_blocks(blocks, flags, quads, row, start, peak, scale, level):
    """Blocks of four tokens of a chunk in which the largest noise would let a token win; returns their number.

    Args:
        flags / quads: uint8 [CHUNK] and uint32 [BLOCKS], the same memory, overwritten.
    """
    size = row.shape[0]
    for i in range(size):
        flags[i] = np.uint8(level + (row[i] - peak) * scale >= FLOOR)
    for i in range(size, (size + 3) // 4 * 4):
        flags[i] = np.uint8(0)
    count = 0
    for j in range((size + 3) // 4):
        blocks[count] = np.uint32(start // 4 + j)
        count += np.int64(quads[j] != np.uint32(0))
    return count


@compiled()
def _fill_blocks(blocks, start, size):
    """All blocks of a chunk; returns their number."""
    count = (size + 3) // 4
    for j in range(count):
        blocks[j] = np.uint32(start // 4 + j)
    return count


@compiled()
def _scan(bits):
    """Largest entry of float32 bit patterns, as an ordered integer; entries that are not finite; those that are -inf.

    Integers because a maximum of floats is not vectorised: with the lower bits of negative patterns flipped, patterns order
    like their values.
    """
    peak, broken, low = np.int32(-(1 << 31)), np.int32(0), np.int32(0)
    for i in range(bits.shape[0]):
        value = bits[i]
        peak = max(peak, np.int32(value ^ ((value >> np.int32(31)) & np.int32(0x7FFFFFFF))))
        broken += np.int32((value & np.int32(0x7F800000)) == np.int32(0x7F800000))
        low += np.int32(value == np.int32(-0x800000))
    return peak, broken, low


@compiled()
def _find_smallest_half(words, count):
    """The half of the complement of the largest word: what its noise is compared by."""
    smallest = np.int32(0x7FFFFFFF)
    for lane in range(4):
        for j in range(count):
            smallest = min(smallest, np.int32(~words[lane, j] >> np.uint32(1)))
    return smallest


@compiled()
def _find_winner(row, peak, first, peaks, scale, key, position, temperature, work):
    """Best token of a row, and how far its score is above the second best of those that were scored.

    Args:
        first: index of the chunk that is looked at first.
        peaks: highest logit of each chunk.
        work: buffers of `find_winners`.
    """
    words, halves, patterns, blocks, flags, quads = work
    winner, best, second = np.int64(-1), -np.inf, -np.inf
    top = np.float64(peak) / temperature
    level = np.float32(np.inf)
    size = row.shape[0]
    dense = 0
    for turn in range(-1, peaks.shape[0]):
        chunk = first if turn < 0 else turn
        limit = level + (peaks[chunk] - peak) * scale
        if turn == first or not limit >= FLOOR:
            continue
        start = chunk * CHUNK
        part = row[start : start + CHUNK]
        if dense > 0:
            dense -= 1
            count = _fill_blocks(blocks, start, part.shape[0])
        else:
            count = _find_blocks(blocks, flags, quads, part, start, peak, scale, level)
            if 2 * count > BLOCKS:
                dense = DENSE
        _fill_words(words, blocks, count, key[0], key[1], position)
        # The chunk's largest noise on its highest logit; both sides of the comparison are monotonic in float32 too.
        halves[0, 0] = np.float32(_find_smallest_half(words, count))
        if np.float32(patterns[0, 0]) > limit:
            continue
        for lane in range(4):
            for j in range(count):
                halves[lane, j] = np.float32(np.int32(~words[lane, j] >> np.uint32(1)))
        for j in range(count):
            smallest = min(min(patterns[0, j], patterns[1, j]), min(patterns[2, j], patterns[3, j]))
            if np.float32(smallest) > limit:
                continue
            for lane in range(4):
                token = np.int64(blocks[j]) * 4 + lane
                if token < size and np.float32(patterns[lane, j]) <= level + (row[token] - peak) * scale:
                    u = (np.float64(words[lane, j]) + 0.5) * 2.0**-32
                    z = np.float64(row[token]) / temperature - math.log(-math.log(u))
                    if z > best:
                        winner, best, second = token, z, best
                        # 31 for the halved word, 127 for the exponent's bias.
                        level = np.float32((31.0 + 127.0 + SLACK + (top - best) * _LOG2_E) * _MANTISSA)
                    elif z > second:
                        second = z
    return winner, best - second


@compiled("void(float32[:, ::1], int32[:, ::1], uint64[::1], int64[::1], float64, int64, int64[::1], uint8[::1])")
def find_winners(logits, bits, keys, positions, temperature, vocab_size, winners, flags):
    """Winner of each row, unless the row is flagged `CLOSE`.

    Args:
        logits / bits: [n, at least vocab_size], the same memory as float32 and as int32.
        keys / positions: [n].
        temperature: finite, above 0.
        winners: int64 [n], written.
        flags: uint8 [n], written: `NON_FINITE` where a valid logit is not finite, `CLOSE` where the winner was not decided.
    """
    halves, flags_of_chunk = np.empty((4, BLOCKS), dtype=np.float32), np.empty(CHUNK, dtype=np.uint8)
    words, blocks = np.empty((4, BLOCKS), dtype=np.uint32), np.empty(BLOCKS + 1, dtype=np.uint32)
    work = (words, halves, halves.view(np.int32), blocks, flags_of_chunk, flags_of_chunk.view(np.uint32))
    peaks = np.empty((vocab_size + CHUNK - 1) // CHUNK, dtype=np.float32)
    ordered = peaks.view(np.int32)
    scale = np.float32(_LOG2_E / temperature * _MANTISSA)
    for n in range(logits.shape[0]):
        broken, low, first, highest = 0, 0, 0, np.int32(-(1 << 31))
        for chunk in range(peaks.shape[0]):
            start = chunk * CHUNK
            found, bad, lows = _scan(bits[n, start : min(start + CHUNK, vocab_size)])
            ordered[chunk] = found ^ ((found >> np.int32(31)) & np.int32(0x7FFFFFFF))
            broken, low = broken + bad, low + lows
            if found > highest:
                highest, first = found, chunk
        peak = peaks[first]
        flags[n] = NON_FINITE if broken else 0
        if broken > low or not abs(np.float64(peak) / temperature) <= PEAK_MAX:
            flags[n] |= CLOSE
            continue
        key, position = (keys[n] & _LOW, keys[n] >> _SHIFT), np.uint64(positions[n]) & _LOW
        winners[n], lead = _find_winner(
            logits[n, :vocab_size], peak, first, peaks, scale, key, position, temperature, work
        )
        if not lead > MARGIN:
            flags[n] |= CLOSE


@compiled("void(uint64[::1], int64[::1], int64[::1], uint32[::1])")
def fill_words(keys, positions, tokens, words):
    """Noise words of single tokens: uint32 [n], written; the other arrays are [n]."""
    block, number = np.empty((4, 1), dtype=np.uint32), np.empty(1, dtype=np.uint32)
    for n in range(keys.shape[0]):
        position, token = np.uint64(positions[n]) & _LOW, np.uint64(tokens[n])
        number[0] = np.uint32(token // np.uint64(4))
        _fill_words(block, number, 1, keys[n] & _LOW, keys[n] >> _SHIFT, position)
        words[n] = block[token % np.uint64(4), 0]
