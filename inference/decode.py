"""Continuous batching: many requests through a bounded number of rows, each row from prefill to its last token.

Requests wait in a queue; a row that ends is refilled before the next step, so a step never carries a finished row. A row's
tokens depend on its own prompt, key and answers alone: noise is a function of (key, position), positions are the row's own,
and neighbours are masked. No row is ever evicted. The queue is sorted by prompt, so equal prompts are prefilled once and
at most one prompt has samples both admitted and waiting; its donor row cannot be overwritten before they are admitted.

Neighbours: inference.engine sizes rows and draws tokens, inference.forward computes states, inference.kv_pool holds them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from inference.draw import Draw
from inference.forward import Forward, States
from inference.kv_pool import Feed, KvPool
from inference.memory import FORWARD_TOKENS_MAX
from protocol.errors import Fault
from protocol.ports import Generation, SampleRequest

#: Steps whose states are kept as they are before they are narrowed together.
FRESH_STEPS_MAX = 64


class _Donor(NamedTuple):
    """A prefilled prompt: the row that holds it, and the states that follow it."""

    slot: int
    states: States
    row: int


def _join(parts: list[States]) -> States:
    return parts[0] if len(parts) == 1 else States(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


class Decoder:
    """One run over a queue of requests.

    Args:
        forward: the policy.
        pool: rows to decode in; each is wide enough for any request's prompt and `max_tokens`.
        requests: all requests of the run.
        draw: samples.
        max_tokens: longest completion.
        stop_tokens: ids that end a turn.
        vocab_size: ids that the policy knows; an answer may hold no other.
        capture: whether hidden states are kept.
    """

    def __init__(
        self,
        forward: Forward,
        pool: KvPool,
        requests: Sequence[SampleRequest],
        draw: Draw,
        *,
        max_tokens: int,
        stop_tokens: Sequence[int],
        vocab_size: int,
        capture: bool,
    ) -> None:
        self._forward, self._pool, self._requests, self._draw = forward, pool, requests, draw
        self._max_tokens, self._vocab_size, self._capture = max_tokens, vocab_size, capture
        self._stops = frozenset(stop_tokens)
        order = sorted(range(len(requests)), key=lambda i: (len(requests[i].prompt), requests[i].prompt))
        self._queue = deque(order)
        rows = pool.num_rows
        self._owner = np.zeros(rows, dtype=np.int64)
        self._keys = np.zeros(rows, dtype=np.uint64)
        self._lengths = np.zeros(rows, dtype=np.int64)
        self._counts = np.zeros(rows, dtype=np.int64)
        self._tokens = np.zeros((rows, max_tokens), dtype=np.int64)
        self._used = 0
        self._free: list[int] = []
        self._donors: dict[tuple[int, ...], _Donor] = {}
        self._completions: list[tuple[int, ...]] = [()] * len(requests)
        self._owners: list[NDArray[np.int64]] = []
        self._fresh: list[torch.Tensor] = []
        self._bits: list[NDArray[np.uint16]] = []

    def run(self) -> list[Generation]:
        """Complete every request; results in the order of the requests."""
        while True:
            self._admit()
            self._close_holes()
            if not self._used:
                return self._collect()
            slots = np.arange(self._used)
            last = self._tokens[slots, self._counts[: self._used] - 1]
            feed = Feed(slots, last[:, None], np.ones_like(slots), self._lengths[: self._used].copy())
            self._take(slots, self._feed(feed))

    def _feed(self, feed: Feed) -> States:
        states = self._forward(self._pool, feed)
        self._lengths[feed.slots] = feed.starts + feed.counts
        return states

    def _admit(self) -> None:
        """Fill every free row from the queue. Rows that end with their first token are filled again."""
        while self._queue and (self._free or self._used < self._pool.num_rows):
            slots: list[int] = []
            prompts: list[tuple[int, ...]] = []
            new: dict[tuple[int, ...], int] = {}
            while self._queue and (self._free or self._used < self._pool.num_rows):
                slot, index = self._next_slot(), self._queue.popleft()
                prompt = self._requests[index].prompt
                self._owner[slot], self._keys[slot] = index, self._requests[index].key
                self._counts[slot] = 0
                slots.append(slot)
                prompts.append(prompt)
                if prompt not in self._donors:
                    new.setdefault(prompt, slot)
            self._start(slots, prompts, new)

    def _next_slot(self) -> int:
        """A row to use: the lowest free one, so that few rows have to move at the end."""
        if self._free:
            self._free.sort(reverse=True)
            return self._free.pop()
        self._used += 1
        return self._used - 1

    def _start(self, slots: list[int], prompts: list[tuple[int, ...]], new: dict[tuple[int, ...], int]) -> None:
        """Give admitted rows their prompts, and sample their first tokens.

        Rows of an earlier prompt are copied first: prefilling may overwrite the donor, whose samples are all admitted then.
        """
        pairs = list(zip(slots, prompts, strict=True))
        self._share([(slot, prompt) for slot, prompt in pairs if prompt not in new])
        if new:
            self._lengths[list(new.values())] = 0
            states = self._feed_all(list(new.values()), list(new))
            self._donors.update({prompt: _Donor(slot, states, row) for row, (prompt, slot) in enumerate(new.items())})
            self._share([(slot, prompt) for slot, prompt in pairs if prompt in new])
        self._lengths[slots] = [len(prompt) for prompt in prompts]
        first = self._gather([self._donors[prompt] for prompt in prompts])
        waiting = self._requests[self._queue[0]].prompt if self._queue else None
        self._donors = {
            prompt: _Donor(donor.slot, donor.states.select([donor.row]), 0)
            for prompt, donor in self._donors.items()
            if prompt == waiting
        }
        self._take(np.array(slots), first)

    def _share(self, rows: list[tuple[int, tuple[int, ...]]]) -> None:
        """Copy prompts from their donors to other rows."""
        pairs = [(self._donors[prompt].slot, slot, len(prompt)) for slot, prompt in rows]
        pairs = [pair for pair in pairs if pair[0] != pair[1]]
        if pairs:
            sources, targets, lengths = (list(column) for column in zip(*pairs, strict=True))
            self._pool.copy_rows(sources, targets, max(lengths))

    def _feed_all(self, slots: list[int], pieces: list[tuple[int, ...]]) -> States:
        """Feed each row a piece of any length, in passes of at most FORWARD_TOKENS_MAX tokens; states in order."""
        parts: list[States] = []
        start = 0
        while start < len(pieces):
            end, widest = start + 1, len(pieces[start])
            while end < len(pieces) and (end + 1 - start) * max(widest, len(pieces[end])) <= FORWARD_TOKENS_MAX:
                widest = max(widest, len(pieces[end]))
                end += 1
            parts.append(self._feed_padded(slots[start:end], pieces[start:end], widest))
            start = end
        return _join(parts)

    def _feed_padded(self, slots: list[int], pieces: list[tuple[int, ...]], widest: int) -> States:
        """One pass, or several for one long piece."""
        rows, counts = np.array(slots), np.array([len(piece) for piece in pieces])
        tokens = np.zeros((len(pieces), widest), dtype=np.int64)
        for row, piece in enumerate(pieces):
            tokens[row, : len(piece)] = piece
        for start in range(0, widest, FORWARD_TOKENS_MAX):
            part = tokens[:, start : start + FORWARD_TOKENS_MAX]
            states = self._feed(Feed(rows, part, np.minimum(counts, part.shape[1]), self._lengths[rows]))
        return states

    @staticmethod
    def _gather(donors: list[_Donor]) -> States:
        """States of rows that follow donors' prompts; donors come from at most two passes, in order."""
        parts: list[States] = []
        start = 0
        for end in range(1, len(donors) + 1):
            if end == len(donors) or donors[end].states is not donors[start].states:
                parts.append(donors[start].states.select([donor.row for donor in donors[start:end]]))
                start = end
        return _join(parts)

    def _take(self, slots: NDArray[np.int64], states: States) -> None:
        """Sample a token in each row, end rows, and go on behind answers until every row waits for its next step."""
        while len(slots):
            counts = self._counts[slots]
            chosen = self._draw(states.logits, self._keys[slots], counts, slots)
            self._tokens[slots, counts] = chosen
            self._counts[slots] = counts + 1
            if self._capture:
                self._owners.append(self._owner[slots])
                self._fresh.append(states.hidden)
                if len(self._fresh) == FRESH_STEPS_MAX:
                    self._narrow()
            slots, states = self._settle(slots, chosen, states)

    def _settle(
        self, slots: NDArray[np.int64], chosen: NDArray[np.int64], states: States
    ) -> tuple[NDArray[np.int64], States]:
        """End rows that are over and feed answers to rows that are not; returns those rows and their states."""
        answers: dict[int, tuple[int, ...]] = {}
        rows = zip(slots.tolist(), chosen.tolist(), self._counts[slots].tolist(), strict=True)
        for slot in [slot for slot, token, count in rows if token in self._stops or count == self._max_tokens]:
            answer = self._ask(slot)
            if answer:
                answers[slot] = answer
            else:
                self._finish(slot)
        if not answers:
            return slots[:0], states
        going = sorted(answers)
        pieces: list[tuple[int, ...]] = []
        for slot in going:
            count, answer = int(self._counts[slot]), answers[slot]
            pieces.append((int(self._tokens[slot, count - 1]), *answer))
            self._tokens[slot, count : count + len(answer)] = answer
            self._counts[slot] = count + len(answer)
        return np.array(going), self._feed_all(going, pieces)

    def _ask(self, slot: int) -> tuple[int, ...]:
        """What the environment appends behind a row's stop token, empty when the completion is over. Raises `Fault`."""
        respond, count = self._requests[int(self._owner[slot])].respond, int(self._counts[slot])
        if respond is None or count == self._max_tokens:
            return ()
        answer = respond(tuple(self._tokens[slot, :count].tolist()))
        if any(not 0 <= token < self._vocab_size for token in answer):
            raise Fault(
                f"environment answered with {answer[:16]}, the policy's ids go from 0 to {self._vocab_size - 1}"
            )
        return answer if count + len(answer) < self._max_tokens else ()

    def _finish(self, slot: int) -> None:
        self._completions[int(self._owner[slot])] = tuple(self._tokens[slot, : self._counts[slot]].tolist())
        self._free.append(slot)

    def _close_holes(self) -> None:
        """With nothing left to admit, move the last rows into the free ones, so that steps take the first rows."""
        holes, self._free = set(self._free), []
        kept = self._used - len(holes)
        targets = [slot for slot in range(kept) if slot in holes]
        sources = [slot for slot in range(kept, self._used) if slot not in holes]
        self._used = kept
        if targets:
            self._pool.copy_rows(sources, targets, int(self._lengths[sources].max()))
            for state in (self._owner, self._keys, self._lengths, self._counts, self._tokens):
                state[targets] = state[sources]

    def _narrow(self) -> None:
        """Turn captured states into bf16 bits on the host, rounded as protocol.toploc.to_bf16_bits rounds."""
        narrow = torch.cat(self._fresh).to(torch.bfloat16)
        self._bits.append(narrow.view(torch.int16).cpu().numpy().view(np.uint16))
        self._fresh = []

    def _collect(self) -> list[Generation]:
        """Completions with their states, which were captured step by step."""
        counts, bits = np.zeros(len(self._requests), dtype=np.int64), np.zeros((0, 0), dtype=np.uint16)
        if self._fresh:
            self._narrow()
        if self._owners:
            owners = np.concatenate(self._owners)
            bits = np.concatenate(self._bits)[np.argsort(owners, kind="stable")]
            counts = np.bincount(owners, minlength=len(self._requests))
        parts = np.split(bits, np.cumsum(counts)[:-1])
        return [Generation(tokens, hidden) for tokens, hidden in zip(self._completions, parts, strict=True)]
