"""Environments of questions and answers in text: how a question becomes a prompt, and a completion an answer.

A text environment is a `Questions` (reasoning-gym, mathematics, a data set), a codec, a template with the place of the
question, and optionally target lengths. All of them share these arguments, which stand beside their own:

- `tokenizer`: SHA-256 of the model's tokenizer.json; without it one token is one byte, and 256 is the end token
- `template`: a name in `TEMPLATES`, or a text with {question} in it once
- `answer`: which part of a completion is graded: "text" (all of it, stripped), "exact" (all of it), "first_line" or "last_line"
  (of those that are not blank), "tag" (inside the last <answer></answer>)
- `prompt_tokens_max`: the question loses its first tokens when a prompt would be longer
- `held_out`: so many questions, the last ones, are kept back for evaluation and never assigned
- `length`: see `LengthReward`
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from environments.arguments import Field, read_arguments
from environments.files import TOKENIZER, Kind, read_hash
from environments.tokenizer import BytesCodec, Codec, TokenizerCodec
from protocol.errors import ConfigError, Fault

REWARD_MAX = 1_000_000
PROMPT_TOKENS_MAX = 65_536
#: A question keeps its last characters; more cannot fit a prompt of the longest kind in any sensible tokenizer.
QUESTION_CHARS_MAX = 4 * PROMPT_TOKENS_MAX
#: Tokens of the prompts that are kept at hand: 1,024 of the usual longest.
CACHED_TOKENS_MAX = 1 << 22
TEMPLATE_CHARS_MAX = 512
TARGETS_MAX = 64
_HOLE = "{question}"
_TARGET = "{target}"

_TURN = "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
#: Prompts as instruct models were trained on them.
TEMPLATES = {
    "plain": _HOLE,
    "chatml": _TURN,
    "smollm2": "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    + _TURN,
    "qwen2.5": "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    + _TURN,
    "qwen3-no-thinking": _TURN + "<think>\n\n</think>\n\n",
}

#: Arguments that every text environment takes.
TEXT_FIELDS = {
    "tokenizer": Field(str, ""),
    "template": Field(str, "plain", low=1, high=TEMPLATE_CHARS_MAX),
    "answer": Field(str, "text", choices=("text", "exact", "first_line", "last_line", "tag")),
    "prompt_tokens_max": Field(int, 4096, low=1, high=PROMPT_TOKENS_MAX),
    "held_out": Field(int, 0, low=0, high=1_000_000),
    "length": Field(dict, None),
}

_LENGTH_FIELDS = {
    "targets": Field(list, low=1, high=TARGETS_MAX),
    "alpha_micro": Field(int, low=1, high=REWARD_MAX),
    "note": Field(str, "\n\nAnswer in about {target} tokens.", low=1, high=TEMPLATE_CHARS_MAX),
}


class Questions(Protocol):
    """What a text environment asks, and how it grades."""

    @property
    def num_questions(self) -> int: ...

    def question(self, index: int) -> str:
        """Text of a question. Raises `Fault` when it cannot be had."""
        ...

    def known_answer(self, index: int) -> str | None:
        """A right answer, when one is known."""
        ...

    def grade(self, index: int, answer: str) -> int:
        """Reward of an answer in millionths. An infrastructure error raises `Fault`, it is never 0."""
        ...


class LengthReward(NamedTuple):
    """Completions of a wanted length (INTELLECT-2, section 3.1.2): reward = task reward - alpha |target - tokens|, within 0..1.

    Every question is asked once for every target, so the prompt index that a slot was assigned fixes the target too.

    Attributes:
        targets: wanted lengths, in sampled tokens, the stop token included.
        alpha_micro: price of one token too many or too few, in millionths.
        note: how the question states its target; holds {target} once.
    """

    targets: tuple[int, ...]
    alpha_micro: int
    note: str

    def apply(self, reward: int, target: int, num_tokens: int) -> int:
        """Reward of a completion of `num_tokens` tokens, in millionths."""
        return min(max(reward - self.alpha_micro * abs(target - num_tokens), 0), REWARD_MAX)


class TextOptions(NamedTuple):
    """Shared arguments, read."""

    tokenizer: str
    head: str
    tail: str
    answer: str
    prompt_tokens_max: int
    held_out: int
    length: LengthReward | None


class TextEnvironment:
    """Prompts and rewards of questions.

    Args:
        questions: what is asked.
        codec: text to tokens.
        options: the shared arguments.
        first / count: range of question numbers; all but the held-out ones when None.

    Raises:
        ConfigError: when no question is left, or the template alone fills the prompt.
    """

    def __init__(
        self, questions: Questions, codec: Codec, options: TextOptions, *, first: int = 0, count: int | None = None
    ) -> None:
        self.questions, self.codec, self.options = questions, codec, options
        self._first = first
        self._count = questions.num_questions - options.held_out if count is None else count
        if self._count < 1:
            raise ConfigError(
                f"{questions.num_questions} questions with {options.held_out} held out: none is left to assign"
            )
        fixed = len(codec.encode(options.head + options.tail))
        if fixed >= options.prompt_tokens_max:
            raise ConfigError(
                f"the template alone has {fixed} tokens: prompt_tokens_max is {options.prompt_tokens_max}, expected more"
            )
        self._prompt = lru_cache(maxsize=max(1, CACHED_TOKENS_MAX // options.prompt_tokens_max))(self._make_prompt)

    @property
    def num_prompts(self) -> int:
        return self._count * (len(self.options.length.targets) if self.options.length else 1)

    @property
    def vocab_size(self) -> int:
        return self.codec.vocab_size

    def held_out(self) -> TextEnvironment:
        """The same environment over the questions that no round assigns. Raises `ConfigError` when there are none."""
        if not self.options.held_out:
            raise ConfigError("this environment keeps no questions back: set held_out in its arguments")
        first = self.questions.num_questions - self.options.held_out
        return TextEnvironment(self.questions, self.codec, self.options, first=first, count=self.options.held_out)

    def _find(self, index: int) -> tuple[int, int]:
        """Question number and target length (0 without one) of a prompt index."""
        if not 0 <= index < self.num_prompts:
            raise IndexError(f"prompt index is {index}, expected 0 to {self.num_prompts - 1}")
        if self.options.length is None:
            return self._first + index, 0
        question, target = divmod(index, len(self.options.length.targets))
        return self._first + question, self.options.length.targets[target]

    def _make_prompt(self, index: int) -> tuple[int, ...]:
        number, target = self._find(index)
        question, options = self.questions.question(number)[-QUESTION_CHARS_MAX:], self.options
        note = options.length.note.replace(_TARGET, str(target)) if options.length else ""
        return tuple(self.codec.encode_between(options.head, question, note + options.tail, options.prompt_tokens_max))

    def prompt(self, index: int) -> tuple[int, ...]:
        """Tokens of the template with the question in it, at most `prompt_tokens_max`."""
        return self._prompt(index)

    def respond(self, index: int, completion: Sequence[int]) -> tuple[int, ...]:
        """Nothing: a stop token ends the completion."""
        return ()

    def known_answer(self, index: int) -> str | None:
        """A text that the prompt's question takes for right, when one is known. It says nothing about its length."""
        answer = self.questions.known_answer(self._find(index)[0])
        return f"<answer>{answer}</answer>" if answer is not None and self.options.answer == "tag" else answer

    def reward(self, index: int, completion: Sequence[int]) -> int:
        """What the questions say about the answer, less what the length is off its target, in millionths.

        Raises:
            Fault: when grading fails or gives something that is no reward.
        """
        number, target = self._find(index)
        answer = extract_answer(self.codec.decode(completion), self.options.answer)
        reward = self.questions.grade(number, answer)
        if type(reward) is not int or not 0 <= reward <= REWARD_MAX:
            raise Fault(f"question {number} was graded {reward!r}, expected 0 to {REWARD_MAX}")
        return self.options.length.apply(reward, target, len(completion)) if self.options.length else reward


def extract_answer(text: str, how: str) -> str:
    """The part of a completion's text that is graded; see the module's head. Empty when there is none."""
    if how == "exact":
        return text
    if how == "tag":
        _, found, rest = text.rpartition("<answer>")
        inside, closed, _ = rest.partition("</answer>")
        return inside.strip() if found and closed else ""
    if how in ("first_line", "last_line"):
        lines = [line for line in text.splitlines() if line.strip()]
        return lines[0 if how == "first_line" else -1].strip() if lines else ""
    return text.strip()


def to_micro(what: str, score: float) -> int:
    """A score as a reward in millionths, clipped to 0..1. Raises `Fault` when it is not finite."""
    if not math.isfinite(score):
        raise Fault(f"{what} was graded {score}, expected a number from 0 to 1")
    return round(min(max(score, 0.0), 1.0) * REWARD_MAX)


def read_options(entry: str, table: Mapping[str, Any]) -> TextOptions:
    """The shared arguments of a table that `read_arguments` let through. Raises `ConfigError`."""
    template = TEMPLATES.get(table["template"], table["template"])
    if template.count(_HOLE) != 1:
        raise ConfigError(
            f"{entry}: template is {template[:80]!r}, expected one of {', '.join(TEMPLATES)} or a text with {_HOLE} once"
        )
    if table["tokenizer"]:
        read_hash(f"{entry}: tokenizer", table["tokenizer"])
    head, _, tail = template.partition(_HOLE)
    length = None if table["length"] is None else _read_length(entry, table["length"])
    return TextOptions(
        table["tokenizer"], head, tail, table["answer"], table["prompt_tokens_max"], table["held_out"], length
    )


def _read_length(entry: str, table: Mapping[str, Any]) -> LengthReward:
    read = read_arguments(f"{entry}: length", table, _LENGTH_FIELDS)
    if not all(type(target) is int and 1 <= target <= PROMPT_TOKENS_MAX for target in read["targets"]):
        raise ConfigError(
            f"{entry}: length: targets is {read['targets']}, expected numbers from 1 to {PROMPT_TOKENS_MAX}"
        )
    if read["note"].count(_TARGET) != 1:
        raise ConfigError(f"{entry}: length: note is {read['note']!r}, expected a text with {_TARGET} once")
    return LengthReward(tuple(read["targets"]), read["alpha_micro"], read["note"])


def make_codec(options: TextOptions, files: Mapping[str, bytes]) -> Codec:
    """The codec that the arguments name. Raises `ConfigError` when the tokenizer is not usable."""
    return TokenizerCodec(files[options.tokenizer]) if options.tokenizer else BytesCodec()


def list_text_files(options: TextOptions) -> dict[str, Kind]:
    """The tokenizer, if there is one."""
    return {options.tokenizer: TOKENIZER} if options.tokenizer else {}


def read_text_sources(options: TextOptions) -> list[tuple[str, bytes]]:
    """What decides tokens and answers here: these modules, and the version of the tokenizer package where it is used."""
    folder = Path(__file__).parent
    sources = [(name, (folder / name).read_bytes()) for name in ("text.py", "tokenizer.py")]
    if options.tokenizer:
        sources.append(("tokenizers", importlib.metadata.version("tokenizers").encode()))
    return sources
