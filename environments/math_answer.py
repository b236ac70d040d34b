"""Mathematical answers, compared by math-verify: 1 for one that is equal to the gold answer, 0 for any other.

A data set (environments.dataset) with `reward` "math" is graded here. What is compared is the last \\boxed{} of an answer;
without one the last formula between dollars; without one the last number or numeric expression of its last characters. Before
sympy sees a text it is screened by a rule that everybody computes alike: `screen` says what is let through, the rest is no
answer. A text that is let through and still takes too long is a `Fault`: a slow machine never makes a right answer wrong.
"""

from __future__ import annotations

import importlib.metadata
import re
from functools import lru_cache
from pathlib import Path

from environments.grader_process import GraderProcess
from protocol.errors import ConfigError, Fault

#: Longest text that is parsed.
CHARS_MAX = 256
DIGITS_MAX = 30
DEPTH_MAX = 12
#: Largest exponent, and largest product of the exponents of brackets and the largest other exponent.
EXPONENT_MAX = 999
EXPONENTS_PRODUCT_MAX = 2000
#: With letters in the text: how many different ones, times the exponents of brackets, and functions. Without: functions.
LETTER_POWERS_MAX = 16
LETTERS_MAX = 6
LETTER_FUNCTIONS_MAX = 2
FUNCTIONS_MAX = 8

#: LaTeX commands that are let through: functions, which are counted, and others.
_FUNCTIONS = frozenset(
    ("sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "log", "ln", "exp")
)
_OTHERS = (
    "frac dfrac tfrac pi cdot times div left right text mathrm mathbf mathbb boxed infty cup cap in notin le "
    "leq ge geq lt gt ne neq pm mp circ degree angle theta alpha beta gamma delta lambda mu omega phi rho "
    "sigma begin end pmatrix bmatrix matrix array cases quad qquad emptyset varnothing binom overline approx "
    "equiv to land lor langle rangle lfloor rfloor lceil rceil big Big bigl bigr displaystyle"
)
_LATEX_WORDS = _FUNCTIONS | frozenset(_OTHERS.split(" "))
_WORD = re.compile(r"\\([A-Za-z]+)")
_EXPONENT = re.compile(r"(.?)\s*(?:\^|\*\*)\s*(\{[^{}]*\}|\([^()]*\)|-?\d+|.)?", re.DOTALL)
_FACTORIAL = re.compile(r"(\d*)(.?)\s*!")
_FORMULA = re.compile(r"\$([^$]{1,400})\$|\\\((.{1,400}?)\\\)")
#: A number, or numbers joined by operators, in prose.
_EXPRESSION = re.compile(r"-?\(?-?\d+(?:[,.]\d+)*(?:\s*[-+*/^()]+\s*\d+(?:[,.]\d+)*)*\)*%?")
_NAMED = re.compile(r"\\(?:text|mathrm|mathbf|begin|end)\s*\{[^{}]*\}")
#: Gold answers that need no parser to be known as good ones: most of them, and parsing takes milliseconds.
_PLAIN_NUMBER = re.compile(
    r"-?\d{1,15}(?:\.\d{1,10})?|-?\d{1,9}/[1-9]\d{0,8}|-?\\[dt]?frac\{-?\d{1,9}\}\{[1-9]\d{0,8}\}", re.ASCII
)


def find_answer(text: str) -> tuple[str, bool]:
    """What is compared, and whether it is LaTeX; see the module's head. Empty when a box is not closed."""
    start = text.rfind("\\boxed{")
    if start >= 0:
        depth = 0
        for at in range(start + len("\\boxed"), len(text)):
            depth += (text[at] == "{") - (text[at] == "}")
            if depth == 0:
                return text[start + len("\\boxed{") : at], True
        return "", True
    formulas = _FORMULA.findall(text)
    return ("".join(formulas[-1]), True) if formulas else (text[-CHARS_MAX:], False)


def screen(text: str) -> str:
    """Why a text is not parsed, empty when it is.

    Bounded are length, nesting, digits, powers, factorials, letters and functions. LaTeX commands that make sympy work
    without bound (sums, integrals, limits) are not let through.
    """
    if not text.strip() or len(text) > CHARS_MAX:
        return f"{len(text)} characters, expected 1 to {CHARS_MAX}"
    words = _WORD.findall(text)
    unknown = [word for word in words if word not in _LATEX_WORDS]
    if unknown:
        return f"LaTeX command \\{unknown[0]}"
    if re.search(rf"\d{{{DIGITS_MAX + 1}}}", re.sub(r"[\s,_]", "", text)):
        return f"a number of more than {DIGITS_MAX} digits"
    depth = deepest = 0
    for character in text:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    if deepest > DEPTH_MAX:
        return f"{deepest} levels of brackets, limit {DEPTH_MAX}"
    if re.search(r"\d\s*e\s*[+-]?\s*\d{3}", text, re.IGNORECASE):
        return "a power of ten of more than two digits"
    return _screen_work(text, words) or _screen_factorials(text)


def _screen_work(text: str, words: list[str]) -> str:
    """Powers, letters and functions: what makes sympy's work grow faster than the text."""
    brackets, largest = 1, 1
    for before, exponent in _EXPONENT.findall(text):
        if exponent in ("{", "("):
            return "an exponent that is not closed, or has brackets in it"
        if "^" in exponent or "**" in exponent or "!" in exponent:
            return "a power in an exponent"
        size = 1
        for number in re.findall(r"\d+", exponent):
            size *= max(1, int(number))
        if size > EXPONENT_MAX:
            return f"an exponent of {size}, limit {EXPONENT_MAX}"
        if before in ("}", ")", "]", "!"):
            brackets *= size
        else:
            largest = max(largest, size)
    if brackets * largest > EXPONENTS_PRODUCT_MAX:
        return f"powers of powers up to {brackets * largest}, limit {EXPONENTS_PRODUCT_MAX}"
    if re.search(r"(?:\^|\*\*)\s*(?:\{[^{}]*\}|\([^()]*\)|-?\d+|\w)\s*(?:\^|\*\*)", text):
        return "a power of a power"
    letters = set(re.findall(r"[A-Za-z]", _WORD.sub(" ", _NAMED.sub(" ", text))))
    functions = sum(word in _FUNCTIONS for word in words)
    if functions > FUNCTIONS_MAX or (letters and functions > LETTER_FUNCTIONS_MAX):
        return f"{functions} functions, limit {LETTER_FUNCTIONS_MAX if letters else FUNCTIONS_MAX}"
    if len(letters) > LETTERS_MAX or (brackets > 1 and brackets * len(letters) > LETTER_POWERS_MAX):
        return (
            f"{len(letters)} letters, limit {LETTERS_MAX}, under powers of brackets up to {brackets}, "
            f"limit of the product {LETTER_POWERS_MAX}"
        )
    return ""


def _screen_factorials(text: str) -> str:
    for digits, other in _FACTORIAL.findall(text.replace("\\!", "")):
        if other or not 1 <= len(digits) <= 3:
            return "a factorial of something else than a number of up to three digits"
    if "binom" in text and re.search(r"\d{4}", text):
        return "a binomial coefficient of a number of more than three digits"
    return ""


class MathGrader:
    """Compares answers with gold answers; see the module's head."""

    def __init__(self) -> None:
        self._process = GraderProcess(Path(__file__).with_name("math_worker.py"))
        self._right = lru_cache(maxsize=4096)(self._ask)

    def validate_gold(self, gold: str) -> None:
        """A gold answer that answers can be compared with. Raises `ConfigError`, or `Fault` when the grader fails."""
        reason = screen(gold)
        if not reason and _PLAIN_NUMBER.fullmatch(gold):
            return
        if reason or not self._ask(gold, None):
            raise ConfigError(
                f"gold answer {gold[:80]!r} cannot be compared with: {reason or 'math-verify cannot parse it'}"
            )

    def grade(self, gold: str, answer: str) -> int:
        """1,000,000 for a right answer, else 0. Raises `Fault` when the grader fails or hangs."""
        found, is_latex = find_answer(answer)
        if not is_latex:
            numbers = _EXPRESSION.findall(found)
            found = numbers[-1].strip() if numbers else ""
        return 1_000_000 if not screen(found) and self._right(gold, found) else 0

    def _ask(self, gold: str, answer: str | None) -> bool:
        request = {"gold": f"\\boxed{{{gold}}}"} | ({} if answer is None else {"answer": f"\\boxed{{{answer}}}"})
        reply = self._process.ask(request)
        if type(reply.get("right")) is not bool:
            raise Fault(f"math-verify failed: {str(reply.get('error'))[:200]}")
        return bool(reply["right"])


def read_math_sources() -> list[tuple[str, bytes]]:
    """What decides a comparison: these modules, and the versions of what they stand on."""
    folder = Path(__file__).parent
    packages = ("math-verify", "latex2sympy2_extended", "antlr4-python3-runtime", "sympy", "mpmath")
    try:
        versions = [(name, importlib.metadata.version(name).encode()) for name in packages]
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"mathematical answers need the package {error.name}: pip install math-verify") from None
    return [(name, (folder / name).read_bytes()) for name in ("math_answer.py", "math_worker.py")] + versions
