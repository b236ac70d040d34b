"""Proof before publishing that an environment is deterministic, bounded, and does nothing besides.

The environment works twice, in fresh processes that differ in everything that must not matter: hash seed, locale, time zone,
working directory, home, order of prompts. Both see hostile completions (environments.probe). `judge` turns what they saw into
rows, each with what was observed and its limit. An environment that passes may still fail one day; the rows say what was
looked at.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from protocol.errors import ConfigError
from protocol.task import Environment as EnvironmentSpec

PROMPT_TOKENS_MAX = 65_536
PROMPT_S_MAX = 2.0
REWARD_S_MAX = 5.0
LOAD_S_MAX = 120.0
MEMORY_BYTES_MAX = 1 << 30
REWARD_MAX = 1_000_000
#: Longest time that a probe may take, in seconds.
PROBE_S_MAX = 600.0
REPLY_BYTES_MAX = 1 << 28
#: What the quick check looks at.
QUICK_PROMPTS, QUICK_TOKENS = 3, 512
#: What a participant looks at before it serves a stranger's task, the longest time it waits, and the address space of the try.
TRY_PROMPTS, TRY_TOKENS, TRY_S_MAX, TRY_BYTES_MAX = 2, 64, 60.0, 8 << 30

_CIRCUMSTANCES = (
    {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "TZ": "UTC", "HOME": "/nonexistent"},
    {"PYTHONHASHSEED": "4242", "LC_ALL": "C", "TZ": "Pacific/Kiritimati", "HOME": "/tmp", "LANG": "tr_TR.UTF-8"},
)
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from environments.probe import main; main()"
_ROOT = str(Path(__file__).parent.parent)


class Row(NamedTuple):
    """One thing that was looked at.

    Attributes:
        status: "ok", "failed", or "note" for something that publishing does not depend on.
    """

    check: str
    status: str
    observed: str
    limit: str


def check_environment(
    spec: EnvironmentSpec, folders: Iterable[Path], *, num_prompts: int = 8, max_tokens: int = 256
) -> list[Row]:
    """Look at an environment in two processes.

    Args:
        folders: where its files are.
        num_prompts: how many prompts are looked at.
        max_tokens: length of the longest completions.

    Raises:
        ConfigError: when it cannot be made at all.
    """
    request = _make_request(spec, folders, num_prompts, max_tokens)
    with ThreadPoolExecutor(len(_CIRCUMSTANCES)) as pool:
        first, second = pool.map(_probe, [{**request, "reversed": last} for last in (False, True)], _CIRCUMSTANCES)
    for found in (first, second):
        if "error" in found:
            raise ConfigError(f"environment {spec.entry} cannot be looked at: {found['error']}")
    return judge(first, second, max_tokens)


def _make_request(
    spec: EnvironmentSpec, folders: Iterable[Path], num_prompts: int, max_tokens: int, address_bytes_max: int = 0
) -> dict[str, Any]:
    return {
        "entry": spec.entry,
        "args": spec.args,
        "content_hash": spec.content_hash.hex(),
        "folders": [str(Path(folder).absolute()) for folder in folders],
        "prompts": num_prompts,
        "max_tokens": max_tokens,
        "address_bytes_max": address_bytes_max,
    }


def _probe(request: dict[str, Any], variables: dict[str, str], seconds_max: float | None = None) -> dict[str, Any]:
    seconds_max = PROBE_S_MAX if seconds_max is None else seconds_max
    environment = {"PATH": os.environ.get("PATH", ""), "OMP_NUM_THREADS": "1", **variables}
    with tempfile.TemporaryDirectory(prefix="troth-check-") as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-c", _BOOT, _ROOT],
                input=json.dumps(request).encode(),
                capture_output=True,
                timeout=seconds_max,
                env={**environment, "TMPDIR": folder},
                cwd=folder,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"environment {request['entry']} was not done with {request['prompts']} prompts in {seconds_max:g} s: "
                "it, or one of its completions, hangs"
            ) from None
    try:
        if done.returncode or len(done.stdout) > REPLY_BYTES_MAX:
            raise ValueError(done.stderr.decode(errors="replace").strip()[-300:])
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        raise ConfigError(
            f"environment {request['entry']} ended the process it was looked at in (status {done.returncode}): {error}"
        ) from None
    return found


def judge(first: dict[str, Any], second: dict[str, Any], max_tokens: int) -> list[Row]:
    """Rows of what two probes found."""
    rewards = [reward for found in (first, second) for row in found["rewards"].values() for reward in row]
    prompts = [prompt for found in (first, second) for prompt in found["prompts"].values()]
    rows = [_same(name, first[name], second[name]) for name in ("prompts", "rewards", "answers")]
    rows.append(_same("size", first["num_prompts"], second["num_prompts"]))
    broken = [prompt for prompt in prompts if isinstance(prompt, str)]
    rows.append(_row("prompts are made", not broken, broken[0] if broken else f"{len(prompts)} made", "no errors"))
    lengths = [len(prompt) for prompt in prompts if not isinstance(prompt, str)] or [0]
    span = f"{min(lengths)} to {max(lengths)} tokens"
    rows.append(
        _row(
            "prompt length", min(lengths) >= 1 and max(lengths) <= PROMPT_TOKENS_MAX, span, f"1 to {PROMPT_TOKENS_MAX}"
        )
    )
    answers = [answer for found in (first, second) for row in found["answers"].values() for answer in row]
    rows.append(
        _judge_tokens([p for p in prompts if not isinstance(p, str)] + answers, first["vocab_size"], max_tokens)
    )
    bad = [reward for reward in rewards if type(reward) is not int or not 0 <= reward <= REWARD_MAX]
    text = (
        str(bad[0])[:160] if bad else f"{len(rewards)} rewards of hostile completions, {min(rewards)} to {max(rewards)}"
    )
    rows.append(_row("rewards", not bad, text, f"0 to {REWARD_MAX}, no Fault"))
    rows.append(_judge_right(first["right"]))
    for name, limit in (("load_s", LOAD_S_MAX), ("prompt_s", PROMPT_S_MAX), ("reward_s", REWARD_S_MAX)):
        longest = max(first[name], second[name])
        rows.append(_row(f"longest {name.removesuffix('_s')}", longest <= limit, f"{longest:.3f} s", f"{limit:g} s"))
    memory = max(first["memory_bytes"], second["memory_bytes"])
    rows.append(
        _row(
            "memory while working",
            memory <= MEMORY_BYTES_MAX,
            f"{memory >> 20} MiB more",
            f"{MEMORY_BYTES_MAX >> 20} MiB",
        )
    )
    attempts = sorted({*first["attempts"], *second["attempts"]})
    rows += [
        _row(name, not found, "; ".join(found) or "nothing tried", limit)
        for name, limit in (
            ("network", "no connection"),
            ("process", "none but this package's own graders"),
            ("write", "nothing outside of the temporary folder"),
            ("variable", "no environment variable is read"),
            ("code", "no completion is compiled as Python"),
        )
        for found in [[text for text in attempts if text.startswith(name + ":")]]
    ]
    return rows


def _row(check: str, good: bool, observed: str, limit: str) -> Row:
    return Row(check, "ok" if good else "failed", observed, limit)


def _same(name: str, mine: Any, theirs: Any) -> Row:
    """Whether two processes saw the same; names the first prompt where they did not."""
    limit = "the same in another process, locale, time zone, folder and order"
    if mine == theirs:
        count = len(mine) if isinstance(mine, dict) else mine
        return Row(f"same {name}", "ok", f"{count} alike", limit)
    if not isinstance(mine, dict):
        return Row(f"same {name}", "failed", f"{mine} and {theirs}", limit)
    index = next((index for index in mine if mine[index] != theirs.get(index)), "?")
    return Row(
        f"same {name}",
        "failed",
        f"prompt {index}: {str(mine.get(index))[:60]} and {str(theirs.get(index))[:60]}",
        limit,
    )


def _judge_tokens(sequences: list[Any], vocab_size: int, max_tokens: int) -> Row:
    broken = [sequence for sequence in sequences if isinstance(sequence, str)]
    tokens = [token for sequence in sequences if not isinstance(sequence, str) for token in sequence] or [0]
    if broken:
        return Row("tokens", "failed", broken[0][:160], f"0 to {vocab_size - 1}")
    span = f"{min(tokens)} to {max(tokens)}"
    return _row("tokens", min(tokens) >= 0 and max(tokens) < vocab_size, span, f"0 to {vocab_size - 1}")


def _judge_right(right: dict[str, Any]) -> Row:
    """Answers that are known to be right should be worth something; an environment need not know any."""
    known = [reward for reward in right.values() if reward is not None]
    if not known:
        return Row("known answers", "note", "none is known", "a right answer has a reward")
    paid = sum(type(reward) is int and reward > 0 for reward in known)
    return _row(
        "known answers", paid == len(known), f"{paid} of {len(known)} have a reward", "a right answer has a reward"
    )


def require_sound(spec: EnvironmentSpec, folders: Iterable[Path], *, max_tokens: int) -> None:
    """The quick check before a task is published. Raises `ConfigError` with the rows that failed."""
    failed = [
        f"{row.check}: observed {row.observed}, expected {row.limit}"
        for row in check_environment(spec, folders, num_prompts=QUICK_PROMPTS, max_tokens=min(max_tokens, QUICK_TOKENS))
        if row.status == "failed"
    ]
    if failed:
        raise ConfigError(
            f"environment {spec.entry} is not fit to be published: {'; '.join(failed)}; see `troth env check`, or publish with "
            "--no-check if you know better than the nodes that will refuse to work"
        )


def require_bounded(spec: EnvironmentSpec, folders: Iterable[Path], *, seconds_max: float = TRY_S_MAX) -> None:
    """Try a stranger's environment in a process of its own, so that one that hangs or fills the memory stops nobody.

    Raises:
        ConfigError: when it does not make and reward some prompts in time, or cannot be made.
    """
    request = _make_request(spec, folders, TRY_PROMPTS, TRY_TOKENS, TRY_BYTES_MAX)
    found = _probe({**request, "reversed": False}, _CIRCUMSTANCES[0], seconds_max)
    if "error" in found:
        raise ConfigError(f"environment {spec.entry} cannot be used: {found['error']}")


def sample_environment(
    spec: EnvironmentSpec, folders: Iterable[Path], *, num_prompts: int, first: int, completions: list[str]
) -> list[dict[str, Any]]:
    """Some prompts with a right answer, where one is known, and the rewards of given completions.

    Args:
        first: index of the first prompt.
        completions: texts; for an environment without text, token ids separated by commas.

    Raises:
        ConfigError: when the environment cannot be made, or a completion is none.
    """
    import environments
    from environments.probe import reward_known_answer

    environment = environments.load(spec, folders)
    if not 0 <= first < environment.num_prompts:
        raise ConfigError(f"first prompt is {first}, expected 0 to {environment.num_prompts - 1}")
    rows = []
    for index in range(first, min(first + num_prompts, environment.num_prompts)):
        prompt = environment.prompt(index)
        known = getattr(environment, "known_answer", lambda index: None)(index)
        row: dict[str, Any] = {
            "index": index,
            "tokens": len(prompt),
            "prompt": render(environment, prompt),
            "answer": known,
        }
        if hasattr(environment, "solution"):
            row["answer"] = render(environment, environment.solution(index))
        row["reward"] = reward_known_answer(environment, index)
        row["completions"] = [
            {"completion": text, "reward": environment.reward(index, read_completion(environment, text))}
            for text in completions
        ]
        rows.append(row)
    return rows


def render(environment: Any, tokens: Iterable[int]) -> str:
    """Tokens as people read them: text, else by the vocabulary of the environment's module, else ids."""
    codec = getattr(environment, "codec", None)
    if codec is not None:
        return str(codec.show(list(tokens)))
    words = getattr(sys.modules[type(environment).__module__], "VOCABULARY", None)
    return "".join(words[token] for token in tokens) if words else ",".join(str(token) for token in tokens)


def read_completion(environment: Any, text: str) -> tuple[int, ...]:
    """Tokens of a completion that somebody typed. Raises `ConfigError`."""
    codec = getattr(environment, "codec", None)
    if codec is not None:
        tokens = tuple(codec.encode(text))
    else:
        try:
            tokens = tuple(int(part) for part in text.split(","))
        except ValueError:
            raise ConfigError(f"completion is {text!r}, expected token ids separated by commas") from None
    if not tokens or not all(0 <= token < environment.vocab_size for token in tokens):
        raise ConfigError(f"completion {text!r} is {tokens}, expected ids from 0 to {environment.vocab_size - 1}")
    return tokens
