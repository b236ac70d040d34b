"""From text to tokens and back: plain bytes, or the tokenizer of a model given as a tokenizer.json.

A tokenizer.json is a stranger's program in a small language, so only parts that are deterministic and bounded are let in:
byte-pair encoding without dropout, normal forms, splits by patterns known here, short replacements.
Encoding never adds tokens by itself; decoding ends at the first token that is no text (an end-of-turn marker, for example).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from typing import Any, Protocol

from protocol.errors import ConfigError

#: The codec of bytes: 256 values and one end token.
BYTES_END = 256

#: Largest token id of a tokenizer.json.
TOKEN_ID_MAX = (1 << 24) - 1
#: Longest text that a normalizer or decoder may put in place of another.
REPLACEMENT_CHARS_MAX = 16

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
#: Patterns of pre-tokenizers that are known to run in linear time.
SPLIT_PATTERNS = {
    "GPT-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "Llama 3": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES,
    "Qwen 2": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES,
    "Qwen 3.5": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES,
}

#: What each part of a tokenizer.json may be made of.
_PARTS = {
    "normalizer": {"Sequence", "NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace"},
    "pre_tokenizer": {"Sequence", "ByteLevel", "Digits", "Split", "Metaspace"},
    "decoder": {"Sequence", "ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"},
    "post_processor": {"Sequence", "ByteLevel", "TemplateProcessing"},
}
_DEPTH_MAX = 8
#: Parts of one component, and how many times as long its replacements may make a text, one after the other.
COMPONENT_PARTS_MAX = 32
GROWTH_MAX = 16


class Codec(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the tokens before the first one that is no text."""
        ...

    def show(self, tokens: Sequence[int]) -> str:
        """All tokens as text, markers included, for people."""
        ...

    def encode_between(self, head: str, middle: str, tail: str, tokens_max: int) -> list[int]:
        """Tokens of three texts in a row; when they are more than `tokens_max`, the middle loses its first ones."""
        ...


class BytesCodec:
    """One token a byte of UTF-8; token 256 ends a text. Bytes that are no UTF-8 decode to replacement characters."""

    vocab_size = BYTES_END + 1

    def encode(self, text: str) -> list[int]:
        """See `Codec`. Lone surrogates become question marks."""
        return list(text.encode(errors="replace"))

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Codec`."""
        body: list[int] = list(takewhile(lambda token: 0 <= token < BYTES_END, tokens))
        return bytes(body).decode(errors="replace")

    def show(self, tokens: Sequence[int]) -> str:
        """See `Codec`."""
        return bytes([token for token in tokens if token < BYTES_END]).decode(errors="replace")

    def encode_between(self, head: str, middle: str, tail: str, tokens_max: int) -> list[int]:
        """See `Codec`."""
        before, inside, after = self.encode(head), self.encode(middle), self.encode(tail)
        excess = max(0, len(before) + len(inside) + len(after) - tokens_max)
        return before + inside[excess:] + after


class TokenizerCodec:
    """The tokenizer of a tokenizer.json.

    Args:
        data: the file's bytes.

    Raises:
        ConfigError: when it is malformed, or has a part that is not deterministic and bounded.
    """

    def __init__(self, data: bytes) -> None:
        validate_tokenizer(data)
        self._tokenizer: Any = _build(data)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(number for number, token in added.items() if token.special)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if not 0 < self.vocab_size <= TOKEN_ID_MAX + 1:
            raise ConfigError(f"tokenizer.json has {self.vocab_size} token ids, expected 1 to {TOKEN_ID_MAX + 1}")

    def encode(self, text: str) -> list[int]:
        """See `Codec`. Markers that stand in the text, such as <|im_end|>, become their tokens."""
        return list(self._tokenizer.encode(_clean(text), add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Codec`."""
        body = takewhile(lambda token: 0 <= token < self.vocab_size and token not in self._special, tokens)
        return str(self._tokenizer.decode(list(body), skip_special_tokens=False))

    def show(self, tokens: Sequence[int]) -> str:
        """See `Codec`."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def encode_between(self, head: str, middle: str, tail: str, tokens_max: int) -> list[int]:
        """See `Codec`. A token that spans a border belongs to the head or the tail."""
        head, middle, tail = _clean(head), _clean(middle), _clean(tail)
        found = self._tokenizer.encode(head + middle + tail, add_special_tokens=False)
        ids = list(found.ids)
        excess = len(ids) - tokens_max
        if excess <= 0:
            return ids
        low, high = len(head), len(head) + len(middle)
        inside = [at for at, (start, end) in enumerate(found.offsets) if low <= start < end <= high]
        dropped = set(inside[:excess])
        return [token for at, token in enumerate(ids) if at not in dropped][-tokens_max:]


def _clean(text: str) -> str:
    """Text without lone surrogates, which have no UTF-8."""
    return text.encode(errors="replace").decode()


def _build(data: bytes) -> Any:
    from tokenizers import Tokenizer

    tokenizer: Any
    try:
        tokenizer = Tokenizer.from_str(data.decode())
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the package's panics are no `Exception`
        raise ConfigError(f"tokenizer.json cannot be read: {str(error)[:200]}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _walk(part: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """A component and the components in it. Raises `ConfigError` when it is no component."""
    if part is None:
        return
    if not isinstance(part, dict) or depth > _DEPTH_MAX:
        raise ConfigError("tokenizer.json: a component is no table, or nested too deep")
    yield part
    for name in ("normalizers", "pretokenizers", "decoders", "processors"):
        inside = part.get(name, [])
        if not isinstance(inside, list):
            raise ConfigError(f"tokenizer.json: {name} is {str(inside)[:80]!r}, expected a list")
        for inner in inside:
            yield from _walk(inner, depth + 1)


def validate_tokenizer(data: bytes) -> None:
    """Only parts that are known to be deterministic and bounded.

    Raises:
        ConfigError: naming the part and what is expected.
    """
    try:
        table = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"tokenizer.json is not JSON: {error}") from None
    model = table.get("model") if isinstance(table, dict) else None
    if not isinstance(model, dict) or model.get("type") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else None
        raise ConfigError(f"tokenizer.json: model.type is {kind!r}, expected 'BPE'")
    if model.get("dropout"):
        raise ConfigError("tokenizer.json: model.dropout is set: encoding would be random, expected null")
    for name, known in _PARTS.items():
        parts = list(islice(_walk(table.get(name)), COMPONENT_PARTS_MAX + 1))
        for part in parts:
            if str(part.get("type")) not in known:
                raise ConfigError(
                    f"tokenizer.json: {name} is {part.get('type')!r}, expected one of {', '.join(sorted(known))}"
                )
            _validate_part(name, part)
        _validate_growth(name, parts)


def _validate_part(name: str, part: dict[str, Any]) -> None:
    pattern = part.get("pattern")
    if isinstance(pattern, dict) and "Regex" in pattern and pattern["Regex"] not in SPLIT_PATTERNS.values():
        raise ConfigError(
            f"tokenizer.json: {name} splits by the pattern {str(pattern['Regex'])[:80]!r}, expected that of "
            f"{', '.join(SPLIT_PATTERNS)} (environments.tokenizer.SPLIT_PATTERNS)"
        )
    for key in ("content", "prepend", "replacement"):
        text = part.get(key, "")
        if not isinstance(text, str) or len(text) > REPLACEMENT_CHARS_MAX:
            raise ConfigError(
                f"tokenizer.json: {name} {key} is {str(text)[:40]!r}, expected at most {REPLACEMENT_CHARS_MAX} characters"
            )


def _validate_growth(name: str, parts: Sequence[dict[str, Any]]) -> None:
    """Ten replacements of a letter by sixteen would make 10^12 letters of one."""
    growth = math.prod(max(1.0, _compute_growth(part)) for part in parts)
    if len(parts) > COMPONENT_PARTS_MAX or growth > GROWTH_MAX:
        raise ConfigError(
            f"tokenizer.json: {name} has {len(parts)} parts that make a text up to {growth:g} times as long, limits "
            f"{COMPONENT_PARTS_MAX} and {GROWTH_MAX}"
        )


def _compute_growth(part: dict[str, Any]) -> float:
    """How many times as long a part may make a text, in the worst case."""
    if part["type"] == "ByteLevel":
        return 4.0  # bytes of a character, each a character of its own
    if part["type"] != "Replace":
        return 1.0
    pattern, content = part.get("pattern"), part.get("content", "")
    found = pattern.get("String") if isinstance(pattern, dict) else None
    if found == "":
        return 1.0 + len(content)
    return len(content) / (len(found) if isinstance(found, str) else 1)
