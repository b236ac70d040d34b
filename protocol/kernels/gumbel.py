"""Compiled Gumbel-max over a large vocabulary: the exact score is computed only for tokens that can still win.

The score of token v is z = l/T - log(E), E = -log(u) (protocol.sampling). So argmax z = argmin E/w with
w = exp((l - max l) / T), and since E >= 1 - u, a token can beat a known one, b, only if

    1 - u_v <= (E_b / w_b) * w_v.

Both sides are compared as logarithms to base 2 in float32, the left one from below: the bit pattern of a positive float,
read as an integer and scaled, is its logarithm with the mantissa's part replaced by its chord. `SLACK` is far above
every float32 error in the range where the comparison can go either way, so no winner is ever passed over; tokens that
are let through for nothing only cost their logarithm. A close race is not decided here either: rows whose two best scores
are closer than `MARGIN`, which is far above the float64 error of a score, go back to the caller.
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


@compiled()
def _fill_words(words, low, high, position, first, blocks):
    """Philox4x32-10 words of `blocks` counters (first + j, position, 0, 0), at words[4 * j + lane]."""
    for j in range(blocks):
        c0, c1, c2, c3 = first + np.uint64(j), position, np.uint64(0), np.uint64(0)
        k0, k1 = low, high
        for _ in range(10):
            p0, p1 = c0 * _M0, c2 * _M1
            c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _LOW
            k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
        words[4 * j] = np.uint32(c0)
        words[4 * j + 1] = np.uint32(c1)
        words[4 * j + 2] = np.uint32(c2)
        words[4 * j + 3] = np.uint32(c3)


@compiled()
def _count_possible(words, halves, patterns, row, peak, scale, level):
    """Tokens of a chunk that can win: log2(1 - u) <= level + (row - peak) * scale, both sides times 2^23 and biased."""
    size = row.shape[0]
    for i in range(size):
        halves[i] = np.float32(np.int32(~words[i] >> np.uint32(1)))
    possible = np.int32(0)
    for i in range(size):
        possible += np.int32(np.float32(patterns[i]) <= level + (row[i] - peak) * scale)
    return possible


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
def _find_winner(row, peak, scale, key, position, temperature, words, halves, patterns):
    """Best token of a row, and how far its score is above the second best of those that were scored."""
    winner, best, second = np.int64(-1), -np.inf, -np.inf
    top = np.float64(peak) / temperature
    level = np.float32(np.inf)
    for start in range(0, row.shape[0], CHUNK):
        part = row[start : start + CHUNK]
        size = part.shape[0]
        _fill_words(words, key[0], key[1], position, np.uint64(start // 4), (size + 3) // 4)
        if _count_possible(words, halves, patterns, part, peak, scale, level) == 0:
            continue
        for i in range(size):
            if np.float32(patterns[i]) <= level + (part[i] - peak) * scale:
                u = (np.float64(words[i]) + 0.5) * 2.0**-32
                z = np.float64(part[i]) / temperature - math.log(-math.log(u))
                if z > best:
                    winner, best, second = start + i, z, best
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
    words = np.empty(CHUNK, dtype=np.uint32)
    halves = np.empty(CHUNK, dtype=np.float32)
    patterns = halves.view(np.int32)
    ordered = np.empty(1, dtype=np.int32)
    as_float = ordered.view(np.float32)
    scale = np.float32(_LOG2_E / temperature * _MANTISSA)
    for n in range(logits.shape[0]):
        peak_bits, broken, low = _scan(bits[n, :vocab_size])
        ordered[0] = peak_bits ^ ((peak_bits >> np.int32(31)) & np.int32(0x7FFFFFFF))
        peak = as_float[0]
        flags[n] = NON_FINITE if broken else 0
        if broken > low or not abs(np.float64(peak) / temperature) <= PEAK_MAX:
            flags[n] |= CLOSE
            continue
        key, position = (keys[n] & _LOW, keys[n] >> _SHIFT), np.uint64(positions[n]) & _LOW
        winners[n], lead = _find_winner(
            logits[n, :vocab_size], peak, scale, key, position, temperature, words, halves, patterns
        )
        if not lead > MARGIN:
            flags[n] |= CLOSE


@compiled("void(uint64[::1], int64[::1], int64[::1], uint32[::1])")
def fill_words(keys, positions, tokens, words):
    """Noise words of single tokens: uint32 [n], written; the other arrays are [n]."""
    block = np.empty(4, dtype=np.uint32)
    for n in range(keys.shape[0]):
        position, token = np.uint64(positions[n]) & _LOW, np.uint64(tokens[n])
        _fill_words(block, keys[n] & _LOW, keys[n] >> _SHIFT, position, token // np.uint64(4), 1)
        words[n] = block[token % np.uint64(4)]
