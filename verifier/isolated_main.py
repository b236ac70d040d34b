"""The judging process: a keeper that has read nothing of a stranger's, and the worker it forks, which does the judging.

The keeper is started by the verifier (`verifier.isolation`). It cuts the network off, imports the heavy packages once, and then
forks a worker whenever the verifier asks for one; it passes the worker's socket and process number to the verifier and never
talks to it. So a worker that a submission has killed is replaced within milliseconds, and nothing that one worker did is
left in the next. The keeper ends with the verifier, the worker with the keeper.

What an environment and a scorer are made from is named by the composition root (`troth.judging`).
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from models.policy import read_hidden_size
from protocol.errors import Ignore, TrothError
from protocol.ports import Environment, Scorer
from protocol.task import Environment as EnvironmentSpec
from verifier import isolated_layers as layers
from verifier.isolated_wire import (
    Done,
    Failed,
    Inspect,
    Judge,
    Judged,
    Load,
    Reply,
    Request,
    Setup,
    clip,
    receive_request,
    send,
)
from verifier.judge import inspect_submission, judge_submissions

log = logging.getLogger("troth.verifier.judging")

MakeEnvironment = Callable[[EnvironmentSpec, Sequence[Path]], Environment]
#: (device, dtype, threads, vocab_size) -> scorer.
MakeScorer = Callable[[str, str, int, int], Scorer]

#: Orders to the keeper, one byte each, and its answers, one line of JSON each.
FORK, END = b"f", b"e"


def serve(make_environment: MakeEnvironment, make_scorer: MakeScorer, control: socket.socket, network: str) -> None:
    """The keeper: forks and ends workers as the verifier says. Returns when the verifier is gone.

    Args:
        control / network: what `verifier.isolated_layers.start_keeper` gave.
    """
    gc.collect()
    gc.freeze()
    layers.say(control, {"network": network})
    worker = 0
    try:
        while order := control.recv(1):
            if worker:
                os.kill(worker, signal.SIGKILL)
                _, status = os.waitpid(worker, 0)
                worker = 0
                if order == END:
                    layers.say(control, {"code": os.waitstatus_to_exitcode(status)})
            elif order == END:
                layers.say(control, {"code": 0})
            if order == FORK:
                ours, theirs = socket.socketpair()
                worker = os.fork()
                if not worker:
                    control.close()
                    ours.close()
                    _become_worker(Worker(make_environment, make_scorer), theirs)
                theirs.close()
                socket.send_fds(control, [json.dumps({"pid": worker}).encode() + b"\n"], [ours.fileno()])
                ours.close()
    finally:
        if worker:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)


def _become_worker(worker: Worker, link: socket.socket) -> None:
    """Serve requests until the verifier closes the socket. Never returns."""
    try:
        layers.die_with_parent()
        layers.limit_process()
        while True:
            request = receive_request(link)
            send(link, worker.answer(request))
    except (EOFError, OSError):
        os._exit(0)
    except BaseException:
        log.exception("the judging process ends")
    finally:
        os._exit(1)


class Worker:
    """Answers requests, one after the other."""

    def __init__(self, make_environment: MakeEnvironment, make_scorer: MakeScorer) -> None:
        self._make_environment, self._make_scorer = make_environment, make_scorer
        self._environment: Environment | None = None
        self._scorer: Scorer | None = None
        self._hidden = 0
        self._on_cpu = True

    def answer(self, request: Request) -> Reply:
        """Do what is asked for. Whatever goes wrong is a `Failed`: none of it says anything about a submission."""
        try:
            return self._do(request)
        except Ignore as error:
            return Failed("ignore", clip(error))
        except TrothError as error:
            return Failed("fault", clip(error))
        except Exception as error:  # a stranger's bytes, or a stranger's files, have found something unforeseen
            log.warning("a request failed unexpectedly", exc_info=True)
            return Failed("fault", clip(f"{type(error).__name__}: {error}"))

    def _do(self, request: Request) -> Reply:
        if isinstance(request, Setup):
            self._environment = self._make_environment(request.environment, [Path(one) for one in request.folders])
            self._scorer = self._make_scorer(
                request.device, request.dtype, request.threads, self._environment.vocab_size
            )
            self._on_cpu = request.device == "cpu"
            return Done()
        if isinstance(request, Inspect):
            return Done(clip(inspect_submission(request.spec, request.submission)))
        assert self._environment is not None
        assert self._scorer is not None
        if isinstance(request, Load):
            folder = Path(request.folder)
            self._scorer.load(folder)
            self._hidden = read_hidden_size(folder)
            return Done()
        return self._judge(request, self._environment, self._scorer)

    def _judge(self, request: Judge, environment: Environment, scorer: Scorer) -> Reply:
        started, limits = time.process_time(), request.limits
        # A driver of another device reserves address space at will; the verifier watches resident memory in any case.
        layers.limit_memory(limits.memory_bytes if self._on_cpu else 0)
        layers.limit_cpu(limits.cpu_s)
        try:
            judgement = judge_submissions(
                request.spec, request.submissions, environment=environment, scorer=scorer, hidden=self._hidden
            )
        finally:
            layers.limit_cpu(0)
            layers.limit_memory(0)
        return Judged(judgement, time.process_time() - started)
