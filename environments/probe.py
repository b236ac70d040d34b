"""What an environment does, seen from inside a process of its own: prompts, rewards, times, and what it tried besides.

`troth env check` (troth.environment_check) starts this twice, under different circumstances, and compares. A request on stdin,
one JSON object on stdout. While the environment works, an audit hook refuses connections, further processes and writing, and
records every attempt; reading environment variables is recorded. An audit hook sees what Python does, not what compiled code
does by itself: it finds carelessness, and is no wall against malice. Environments are installed, a task cannot bring one.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError, Fault
from protocol.ports import Environment
from protocol.task import Environment as EnvironmentSpec

#: Stands in a hostile completion, and shows when a completion is compiled as code.
CANARY = "troth_canary_9d41"
ATTEMPTS_MAX = 50
_HERE = str(Path(__file__).parent)

_NETWORK = (
    "socket.connect",
    "socket.bind",
    "socket.sendto",
    "socket.getaddrinfo",
    "socket.gethostbyname",
    "urllib.Request",
)
_PROCESSES = ("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn")
_WRITES = (
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
    "os.utime",
)

#: Texts that graders are known to trip over. Those that show evaluation come first: the others could hang it.
HOSTILE_TEXTS = (
    f"{CANARY}",
    f"[{CANARY} for _ in ()]",
    f"__import__('os').getenv('{CANARY}')",
    " ",
    "0",
    "nan",
    "-inf",
    "1e999999",
    "9" * 5000,
    "-" + "9" * 400,
    "1/0",
    "9**9**9**9",
    "[" * 3000,
    "((((" * 300,
    '{"a":' * 500,
    "\x00\ufffd\u202e",
    "a\n" * 500,
    "½ ² ٣",
    "<answer></answer>",
    "\\boxed{",
    "\\boxed{9^{9^{9^9}}}",
)


class Watch:
    """Refuses and records what an environment has no business doing, while `active`."""

    def __init__(self) -> None:
        self.active = self._compiles = False
        self.attempts: list[str] = []
        self._temporary = os.path.realpath(tempfile.gettempdir())
        sys.addaudithook(self._look)
        self._watch_variables()

    def _note(self, what: str) -> None:
        if what not in self.attempts and len(self.attempts) < ATTEMPTS_MAX:
            self.attempts.append(what)

    def _look(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.active:
            return
        if event == "compile" and (self._compiles or CANARY in _as_text(args[0])):
            self._compiles = True
            self._note("code: compiles the text of a completion")
            raise PermissionError("an environment may not run what a model wrote")
        tried = self._describe(event, args)
        if tried:
            self._note(tried)
            raise PermissionError(f"an environment may not do this: {tried}")

    def _describe(self, event: str, args: tuple[Any, ...]) -> str:
        if event in _NETWORK:
            return f"network: {event} {' '.join(str(part) for part in args if isinstance(part, str | tuple))[:80]}"
        if event in _PROCESSES:
            return "" if event == "subprocess.Popen" and _is_own(args) else f"process: {event} {str(args)[:80]}"
        if event == "open" and _is_writing(args) and not self._is_temporary(args[0]):
            return f"write: {str(args[0])[:80]}"
        if event in _WRITES and not self._is_temporary(args[0]):
            return f"write: {event} {str(args[0])[:80]}"
        return ""

    def _is_temporary(self, path: object) -> bool:
        if isinstance(path, int) or path == os.devnull:
            return True
        return os.path.realpath(str(path)).startswith(self._temporary + os.sep)

    def _watch_variables(self) -> None:
        kind, plain = type(os.environ), type(os.environ).__getitem__

        def look(variables: Any, name: str) -> str:
            if self.active and isinstance(name, str) and not name.startswith("PYTHON"):  # those are the interpreter's
                self._note(f"variable: {name}")
            return str(plain(variables, name))

        kind.__getitem__ = look  # type: ignore[method-assign]


def _as_text(source: object) -> str:
    return source.decode(errors="replace") if isinstance(source, bytes) else str(source or "")


def _is_writing(args: tuple[Any, ...]) -> bool:
    mode, flags = args[1], args[2]
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool(isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _is_own(args: tuple[Any, ...]) -> bool:
    """Whether a process is this Python running one of this package's own scripts: a grader or the sandbox."""
    executable, command = str(args[0]), [str(part) for part in args[1]]
    return executable == sys.executable and any(part.startswith(_HERE) for part in command)


def make_completions(environment: Environment, index: int, max_tokens: int) -> list[tuple[int, ...]]:
    """Completions of one prompt, the same in every process: a right one when known, random, repeated and hostile ones."""
    rng, size = random.Random(index), environment.vocab_size
    found: list[tuple[int, ...]] = [(token,) for token in (0, size - 1)]
    found += [(token,) * max_tokens for token in (0, size - 1, rng.randrange(size))]
    found += [tuple(rng.randrange(size) for _ in range(length)) for length in (1, 7, max_tokens)]
    codec = getattr(environment, "codec", None)
    known = getattr(environment, "known_answer", lambda index: None)(index)
    if codec is not None:
        texts = [*HOSTILE_TEXTS, *([known, known[:-1], known * 2, known + " 7"] if known else [])]
        found += [tuple(codec.encode(text)[:max_tokens]) for text in texts]
    solution = getattr(environment, "solution", None)
    if solution is not None:
        found.append(tuple(solution(index)))
    return [completion for completion in found if completion]


class Timer:
    """Longest time of calls, in seconds."""

    def __init__(self) -> None:
        self.longest = 0.0

    def call(self, work: Callable[..., Any], *args: Any) -> Any:
        """The call's result, or the text of its `Fault`."""
        start = time.perf_counter()
        try:
            return work(*args)
        except Fault as error:
            return f"Fault: {error}"
        except Exception as error:  # an environment raises Fault; anything else is a finding of its own
            return f"{type(error).__name__}: {error}"
        finally:
            self.longest = max(self.longest, time.perf_counter() - start)


def examine(environment: Environment, indices: Sequence[int], max_tokens: int, watch: Watch) -> dict[str, Any]:
    """Prompts, rewards and answers of some prompt indices, in the order given; keyed by index."""
    prompts, rewards, answers, right = {}, {}, {}, {}
    prompt_timer, reward_timer = Timer(), Timer()
    warm = make_completions(environment, indices[0], 4)[0]
    environment.prompt(indices[0]), environment.reward(indices[0], warm)  # late imports, processes of its own
    watch.active = True
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for index in indices:
        prompt = prompt_timer.call(environment.prompt, index)
        prompts[index] = list(prompt) if isinstance(prompt, tuple) else str(prompt)
        completions = make_completions(environment, index, max_tokens)
        rewards[index] = [reward_timer.call(environment.reward, index, tokens) for tokens in completions]
        responses = [reward_timer.call(environment.respond, index, tokens) for tokens in completions]
        answers[index] = [list(tokens) if isinstance(tokens, tuple) else str(tokens) for tokens in responses]
        right[index] = reward_known_answer(environment, index)
    watch.active = False
    return {
        "prompts": prompts,
        "rewards": rewards,
        "answers": answers,
        "right": right,
        "prompt_s": prompt_timer.longest,
        "reward_s": reward_timer.longest,
        "memory_bytes": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before),
        "attempts": watch.attempts,
    }


def reward_known_answer(environment: Environment, index: int) -> int | str | None:
    """Reward of the answer that is known to be right; None when none is known."""
    known = getattr(environment, "known_answer", lambda index: None)(index)
    solution = getattr(environment, "solution", None)
    if solution is not None:
        tokens = tuple(solution(index))
    elif known and getattr(environment, "codec", None) is not None:
        tokens = tuple(environment.codec.encode(known))  # type: ignore[attr-defined]
    else:
        return None
    reward: int | str = Timer().call(environment.reward, index, tokens)
    return reward


def main() -> None:
    """Answer the request on stdin."""
    replies, sys.stdout = sys.stdout, sys.stderr
    sys.dont_write_bytecode = True
    import environments

    request = json.load(sys.stdin)
    if request["address_bytes_max"]:
        resource.setrlimit(resource.RLIMIT_AS, (request["address_bytes_max"],) * 2)
    watch = Watch()
    start = time.perf_counter()
    spec = EnvironmentSpec(request["entry"], request["args"], bytes.fromhex(request["content_hash"]))
    try:
        environment = environments.load(spec, [Path(folder) for folder in request["folders"]])
        load_s = time.perf_counter() - start
        indices = choose_indices(environment.num_prompts, request["prompts"])
        order = indices[::-1] if request["reversed"] else indices
        found = examine(environment, order, request["max_tokens"], watch)
        sizes = {"num_prompts": environment.num_prompts, "vocab_size": environment.vocab_size, "load_s": load_s}
        json.dump({**found, **sizes}, replies)
    except (ConfigError, Fault) as error:
        json.dump({"error": str(error)}, replies)
    except MemoryError:
        json.dump({"error": "it needs more memory than it may have"}, replies)


def choose_indices(num_prompts: int, count: int) -> list[int]:
    """The first, the last and some in between, ascending."""
    if num_prompts <= count:
        return list(range(num_prompts))
    rng = random.Random(num_prompts)
    return sorted({0, num_prompts - 1, *(rng.randrange(num_prompts) for _ in range(count - 2))})


if __name__ == "__main__":
    main()
