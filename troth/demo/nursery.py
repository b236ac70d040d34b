"""Starting many model processes on few cores: import torch and transformers once, then fork a process per role.

`python -m troth.demo.nursery` reads one JSON object a line on stdin: {"name", "arguments", "out", "log"}. Each becomes a
forked child in a session of its own, with stdout and stderr in files of its own, that runs the ordinary `troth` command and
from then on shares nothing with the others but read-only pages. It answers {"name", "pid"}, and {"name", "pid", "code"} when
a child ends. End of input ends it, not its children. Without this a dozen processes would each spend seconds of CPU on the
same imports.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any


def warm_up() -> None:
    """Import what model roles import, and run one tiny generation and prefill, so that forked roles start warm."""
    import importlib

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from inference.engine import TorchEngine
    from protocol.ports import SampleRequest
    from trainer.policy import collect_tensors, encode_config, encode_tensors, write_policy
    from verifier.scorer import TorchScorer

    for module in ("troth.roles", "troth.cheats", "trainer.worker", "verifier.worker", "environments.sort"):
        importlib.import_module(module)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "policy"
        write_policy(path, encode_config(config), encode_tensors(collect_tensors(model)))
        requests = [SampleRequest((1, 2, 3), 1), SampleRequest((1, 2, 3), 2)]
        engine, scorer = TorchEngine(), TorchScorer()
        engine.load(path)
        scorer.load(path)
        made = engine.generate(requests, temperature=1.0, max_tokens=3, stop_tokens=[0])
        scorer.score(requests, [one.tokens for one in made], temperature=1.0)


def _become(arguments: list[str], out: str, log: str) -> None:
    """In the child: take up the role. Never returns."""
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, path in ((1, out), (2, log)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
        sys.argv = ["troth", *arguments]
        from troth.cli import main

        main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        # os._exit flushes nothing, and the buffers must not be shared with the nursery.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve fork requests until stdin ends."""
    warm_up()
    _say({"ready": True})
    names: dict[int, str] = {}
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    signal.set_wakeup_fd(wake_write)
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ, "request")
    selector.register(wake_read, selectors.EVENT_READ, "child")
    while True:
        for key, _ in selector.select():
            if key.data == "request":
                line = sys.stdin.readline()
                if not line:
                    return
                request = json.loads(line)
                pid = os.fork()
                if not pid:
                    _become(request["arguments"], request["out"], request["log"])
                names[pid] = request["name"]
                _say({"name": request["name"], "pid": pid})
            else:
                os.read(wake_read, 4096)
                _reap(names)


def _reap(names: dict[int, str]) -> None:
    """Report children that ended."""
    for pid in list(names):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            _say({"name": names.pop(pid), "pid": pid, "code": os.waitstatus_to_exitcode(status)})


if __name__ == "__main__":
    main()
