"""Adversaries in the sandbox: X1 escape and exhaustion, X2 tampering with the grader, X3 results that depend on speed.

Attacks run twice: as an answer, behind the counted Python, and `run_bare`, as if that had been escaped from, with all of
the interpreter and libc at hand, so that only the kernel's layers are left.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest

from environments.code import CodeQuestions, Row
from environments.sandbox import FunctionCall, Limits, ProgramRun, Sandbox
from protocol.errors import Fault

LIMITS = Limits(steps=200_000, memory_bytes=96 << 20, cpu_s=60, wall_s=120)


@pytest.fixture(scope="module")
def sandbox():
    made = Sandbox(LIMITS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def tight_sandbox():
    """So little memory that it ends before the steps do."""
    made = Sandbox(LIMITS._replace(memory_bytes=6 << 20))
    yield made
    made.close()


def run(sandbox, source, stdin=""):
    [outcome] = sandbox.run(source, [ProgramRun(stdin)])
    return outcome


# Work without end: always the answer's failure, always the same one, never a fault

ENDLESS = {
    "loop": "while True: pass",
    "recursion": "def f(): f()\nwhile True:\n  try: f()\n  except RecursionError: pass",
    "caught": "while True:\n  try:\n    while True: pass\n  except BaseException: pass\n  finally: pass",
    "finaliser": "class A:\n  def __del__(self):\n    while True: pass\nA()",
    "equality": "class A:\n  def __eq__(self, o):\n    while True: pass\n[A()] == [A()]",
    "hash": "class A:\n  def __hash__(self):\n    while True: pass\n{A()}",
    "generator": "def g():\n  while True: yield 1\nsum(g())",
    "sentinel": "list(iter(int, 1))",
    "count": "import itertools\n-1 in itertools.count()",
    "repeat": "import itertools\nsum(itertools.repeat(0))",
    "filter": "import itertools\nnext(filter(None, itertools.repeat(0)))",
    "islice": "import itertools\nnext(itertools.islice(itertools.count(), 10**15, None))",
    "product": "import itertools\nmax(itertools.product(range(1000), repeat=6))",
    "permutations": "import itertools\nfor p in itertools.permutations(range(3000)): pass",
    "callback": "for _ in map(sorted, [list(range(10000))] * 100000): pass",
    "method callback": "for _ in map(list.sort, [list(range(10000))] * 100000): pass",
    "unpacking": "a, *b = iter(range(10**12))",
    "spread": "print(*range(10**12))",
    "format": "while True: f'{1:>1000000}'",
    "percent": "while True: '%01000000d' % 1",
    "ranges": "while True: sum(range(10**4))",
    "membership": "x = list(range(10**4))\nwhile True: -1 in x",
    "slices": "x = [0] * 10**5\nwhile True: x[:]",
    "shifting": "x = [0] * 10**5\nwhile True: x.insert(0, x.pop())",
    "text": "x = 'ab' * 10**5\nwhile True: x.replace('a', 'b')",
    "adding": "x = ''\nwhile True: x += 'ab' * 1000",
    "deep comparison": "a = []\nfor _ in range(90): a = [a, a]\na == [a[0], a[0]]",
    "deep hash": "a = ()\nfor _ in range(90): a = (a, a)\nhash(a)",
    "deep key": "a = ()\nfor _ in range(90): a = (a, a)\n{}[a]",
    "deep lookup": "a = ()\nfor _ in range(90): a = (a, a)\n{}.get(a)",
    "deep text": "a = []\nfor _ in range(90): a = [a, a]\nstr(a)",
    "deep copy": "import copy\na = [1]\nfor _ in range(90): a = [list(a), list(a)]\ncopy.deepcopy(a)",
    "power": "while True: pow(3, 10**600, 10**600 + 1)",
    "factorial": "import math\nwhile True: math.factorial(5000)",
    "square": "x = 3 ** 10000\nwhile True: x * x",
    "division": "x = 3 ** 60000; y = 7 ** 10000\nwhile True: x // y",
    "own length": "class L(list):\n  def __len__(self): return 0\nx = L(range(10**5))\nwhile True: sorted(x)",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_x3_work_without_end_is_the_answers_failure(sandbox, name):
    assert run(sandbox, ENDLESS[name]).error == "limit: steps"


TOO_BIG = {
    "list": ("x = []\nwhile True: x.append([0])", "memory"),
    "caught": ("x = []\nwhile True:\n  try: x.append([0])\n  except: pass", "memory"),
    "caught by with": (
        "class W:\n  def __enter__(self): pass\n  def __exit__(self, *a): return True\n"
        "x = []\nwhile True:\n  with W(): x.append([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])",
        "memory",
    ),
    "caught by finally": (
        "def f():\n  try:\n    while True: x.append([0])\n  finally: return 1\nx = []\nwhile True: f()",
        "memory",
    ),
    "bytes": ("bytes(10**10)", "memory"),
    "bytearray": ("bytearray(10**10)", "memory"),
    "format": ("f'{1:>9999999999}'", "memory"),
    "power": ("10 ** 10 ** 8", "size"),
    "power later": ("x = 10 ** 8\n10 ** x", "size"),
    "shift": ("1 << 10 ** 10", "size"),
    "squares": ("x = 3\nwhile True: x *= x", "steps"),
    "operator": ("import operator\noperator.pow(10, 10**8)", "size"),
    "power function": ("pow(7, 10**8)", "size"),
    "factorial": ("import math\nmath.factorial(10**9)", "size"),
    "comb": ("import math\nmath.comb(10**9, 10**8)", "size"),
    "lcm": ("import math\nmath.lcm(*[3 ** 60000 + i for i in range(60)])", "steps"),
    "range": ("list(range(10**12))", "steps"),
    "text": ("'x' * 10 ** 12", "steps"),
    "sequence": ("[0] * 10 ** 12", "steps"),
    "own sequence": ("[0].__len__() * [0] * 10 ** 12", "steps"),
    "output": ("while True: print('x' * 1000)", "output"),
}


@pytest.mark.parametrize("name", TOO_BIG)
def test_x3_size_without_end_is_the_answers_failure(tight_sandbox, name):
    source, limit = TOO_BIG[name]
    started = time.monotonic()
    assert run(tight_sandbox, source).error == f"limit: {limit}"
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    "source",
    [
        "(" * 5000,
        "-" * 60_000 + "1",
        "lambda:" * 9000 + "1",
        "x" + ".x" * 30_000,
        "[" * 60_000,
        "x" * 65_537,
        "\0",
        "\ud800",
    ],
)
def test_x3_sources_that_hurt_a_compiler(sandbox, source):
    assert run(sandbox, source).error


# Ways out of the counted Python: names that lead inside are refused, by the screen or when they are looked up

ESCAPES = [
    "import os",
    "import sys; sys.modules",
    "from sys import modules",
    "import ctypes",
    "import collections.abc",  # its module object would be `collections`, but no other submodule is to be had
    "__import__('os')",
    "__builtins__",
    "open('/etc/passwd')",
    "eval('1')",
    "exec('1')",
    "compile('1', '', 'eval')",
    "globals()",
    "vars()",
    "dir()",
    "id(1)",
    "breakpoint()",
    "type('X', (), {})",
    "().__class__.__base__.__subclasses__()",
    "getattr((), '__cl' + 'ass__')",
    "hasattr((), '__class__')",
    "setattr(print, '__code__', 1)",
    "import operator; operator.attrgetter('__class__')(())",
    "'{0.__class__}'.format(())",
    "'{0.__class__}'.format_map({})",
    "str.format('{0.__class__}', ())",
    "f = '{0.__class__}'.format; f(())",
    "list(map('{0.__class__}'.format, [()]))",
    "f'{().__class__}'",
    "(lambda: 0).__globals__",
    "(lambda: 0).__code__",
    "print.__self__",
    "print.__func__",
    "def f(): yield\nf().gi_frame.f_back",
    "try: 1 / 0\nexcept Exception as e: e.__traceback__.tb_frame",
    "int.mro()",
    "class A(metaclass=type): pass",
    "class A:\n  __class__ = int",
    "class A:\n  def f(self): return __class__",
    "_troth_tick_ = lambda: True",
    "def _troth_tick_(): return True",
    "def f(_troth_tick_): pass",
    "lambda _troth_call_: 1",
    "import math as _troth_call_",
    "for _troth_call_ in []: pass",
    "try: pass\nexcept Exception as _troth_call_: pass",
    "global _troth_tick_",
    "match 1:\n  case _troth_call_: pass",
    "match 1:\n  case object(__class__=x): pass",
    "match {}:\n  case {**_troth_call_}: pass",
    "class _troth_tick_: pass",
    "f(_troth_x_=1)",
    "(_troth_tick_ := 1)",
    "del _troth_tick_",
    "async def f(): pass",
    "_\uff54roth_tick_ = 1",
    "().__\uff43lass__",
    "import math; math.__loader__",
    "import heapq; heapq.sys",
    "from collections import _sys",
    "import re",
    "import random",
    "import time",
    # names that answer for themselves, and functions that look up what they are told to
    "class S(str):\n  def startswith(self, *a): return False\ngetattr(print, S('__self__'))",
    "class S(str):\n  def startswith(self, *a): return False\nimport operator\noperator.attrgetter(S('__self__'))(print)",
    "class S(str): pass\nS('{0.gi_frame}').format(x for x in [1])",
    "class S(str):\n  def f(self, *a): return super().format(*a)\nS('{0.gi_frame}').f(x for x in [1])",
    "from functools import reduce\nreduce(str.format, ['{0.gi_frame}', (x for x in [1])])",
    "from functools import wraps\nwraps(print, assigned=('__self__',))",
    "from functools import partial\npartial('{}'.format).func.args",
    # the meter, and what counts, by what a program holds of it
    "import sys\nsys.stdout._meter",
    "import sys\nsys.stdout._troth_meter",
    "import copy\ncopy.copy.args",
    "from collections import defaultdict\ndefaultdict(list).default_factory.func",
    "@(lambda f: {})\ndef __builtins__(): pass",
    "def __class__(self): pass",
    # classes that nobody looked at
    "from collections.abc import Hashable\ntype(Hashable)('X', (), {})",
    "class A: __match_args__ = ('__dict__',)",
    "class E(Exception): pass\nmatch E():\n  case E(x): pass",
    "class A: pass\nA.__exit__ = lambda *a: True",
    "class A: pass\nsetattr(A, '__exit__', lambda *a: True)",
    "class A:\n  @(lambda f: lambda *a: True)\n  def __exit__(self, *a): pass",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_x1_the_inside_of_the_interpreter_is_out_of_reach(sandbox, source):
    assert run(sandbox, source).error.startswith("error")


def test_x1_input_cannot_bring_code(sandbox):
    assert (
        run(sandbox, "x = input()\nprint(x)", "__import__('os').system('id')\n").value
        == "__import__('os').system('id')\n"
    )


# The kernel's layers alone

REFUSED = {
    "read the password file": "os.open('/etc/passwd', os.O_RDONLY)",
    "read by libc": "libc_call('open', b'/etc/passwd', 0)",
    "list the root": "os.listdir('/')",
    "write a file": "os.open('/tmp/x', os.O_WRONLY | os.O_CREAT)",
    "make a folder": "os.mkdir('/x')",
    "make a symbolic link": "os.symlink('/etc/passwd', '/x')",
    "make a hard link": "os.link('/etc/passwd', '/x')",
    "anonymous file": "os.memfd_create('x')",
    "pipe": "os.pipe()",
    "second descriptor": "os.dup(1)",
    "internet socket": "libc_call('socket', 2, 1, 0)",
    "unix socket": "libc_call('socket', 1, 1, 0)",
    "netlink socket": "libc_call('socket', 16, 3, 0)",
    "socket pair": "libc_call('socketpair', 1, 1, 0, None)",
    "fork": "os.fork()",
    "vfork by number": "libc_call('syscall', 58)",
    "clone by number": "libc_call('syscall', 56, 17, 0, 0, 0, 0)",
    "clone3 by number": "libc_call('syscall', 435, 0, 0)",
    "thread": "import _thread; _thread.start_new_thread(print, ())",
    "program": "os.execv('/bin/sh', ['sh'])",
    "program of a descriptor": "libc_call('syscall', 322, 1, b'', None, None, 4096)",
    "kill the keeper": "os.kill(1, 9)",
    "kill everything": "os.kill(-1, 9)",
    "kill by number": "libc_call('syscall', 62, 1, 9)",
    "another signal": "libc_call('tgkill', 1, 1, 9)",
    "trace": "libc_call('ptrace', 16, 1, 0, 0)",
    "read another's memory": "libc_call('syscall', 310, 1, 0, 0, 0, 0, 0)",
    "mount": "libc_call('mount', b'none', b'/', b'tmpfs', 0, None)",
    "unmount": "libc_call('umount2', b'/', 2)",
    "new namespaces": "libc_call('unshare', 0x10000000)",
    "enter a namespace": "libc_call('setns', 0, 0)",
    "change the root": "os.chroot('/')",
    "become root": "os.setuid(0)",
    "capabilities": "libc_call('syscall', 126, 0, 0)",
    "raise limits": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "keys": "libc_call('syscall', 250, 0, 0, 0, 0, 0)",
    "bpf": "libc_call('syscall', 321, 0, 0, 0)",
    "kernel": "libc_call('syscall', 246, 0, 0, 0, 0)",
    "io_uring": "libc_call('syscall', 425, 1, 0)",
    "shared memory": "libc_call('shmget', 1, 4096, 0o1600)",
    "message queue": "libc_call('msgget', 1, 0o1600)",
    "host name": "libc_call('sethostname', b'x', 1)",
    "clock": "libc_call('settimeofday', b'0' * 16, None)",
    "seccomp": "libc_call('prctl', 22, 0, 0, 0, 0)",
    "executable memory": "libc_call('mmap', None, 4096, 7, 0x22, -1, 0)",
    "turn memory executable": "libc_call('mprotect', ctypes.addressof(ctypes.create_string_buffer(8192)) & ~4095, 4096, 7)",
    "terminal": "libc_call('ioctl', 1, 0x5412, b'x')",
    "user faults": "libc_call('syscall', 323, 0)",
    "environment of others": "os.listdir('/proc')",
}
BARE = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def libc_call(name, *args):
    function = getattr(libc, name)
    function.restype = ctypes.c_long if name in ('mmap', 'syscall') else ctypes.c_int
    made = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    if function(*made) == -1:
        raise OSError(ctypes.get_errno(), name)
"""


def run_bare(sandbox, attack):
    body = "".join(f"    {line}\n" for line in attack.split("; "))
    caught = "except (OSError, RuntimeError, ImportError, ValueError):\n    os.write(1, b'refused')\n"
    source = f"{BARE}try:\n{body}    os.write(1, b'done')\n{caught}"
    return sandbox.run_bare(source)


@pytest.mark.parametrize("name", REFUSED)
def test_x1_the_kernel_refuses(sandbox, name):
    assert run_bare(sandbox, REFUSED[name]) == b"refused"
    assert run(sandbox, "print(1)").value == "1\n"


def test_x1_a_bare_run_can_do_what_is_left(sandbox):
    """The control: what is tried above fails for what it asks, not for how it asks."""
    assert run_bare(sandbox, "libc_call('mmap', None, 4096, 3, 0x22, -1, 0)") == b"done"
    assert run_bare(sandbox, "os.write(1, b'')") == b"done"


def test_x1_nothing_of_the_environment_is_inside(sandbox, monkeypatch):
    monkeypatch.setenv("TROTH_PASSWORD", "secret")
    one = Sandbox(LIMITS)
    seen = json.loads(one.run_bare("import os, json\nos.write(1, json.dumps(dict(os.environ)).encode())"))
    one.close()
    assert set(seen) <= {"PYTHONHASHSEED", "LC_CTYPE"}


def test_x1_memory_beyond_the_limit_is_not_to_be_had(sandbox):
    got = sandbox.run_bare(
        "import os\nblocks = []\ntry:\n  while True: blocks.append(bytearray(1 << 20))\nexcept MemoryError:\n"
        "  n = len(blocks)\n  del blocks\n  os.write(1, str(n).encode())"
    )
    assert 0 < int(got) <= LIMITS.memory_bytes >> 20


@pytest.mark.parametrize(
    ("attack", "dies"),
    [
        ("import ctypes\nctypes.string_at(0)", "segmentation fault"),
        ("import os\nos.abort()", "abort"),
        ("import os\nos._exit(0)", "silent exit"),
        ("import os\nos._exit(70)", "exit code of a failed start"),
        ("import os\nos.write(1, b'x' * (1 << 23))", "flood"),
        ("import os\nwhile True: os.write(1, b'[\"value\", 1]\\n')", "flood of results"),
    ],
)
def test_x1_dying_leaves_the_keeper_alive(sandbox, attack, dies):
    with contextlib.suppress(Fault):
        sandbox.run_bare(attack)
    assert run(sandbox, "print(1)").value == "1\n"


def test_x1_nothing_is_left_running_when_it_is_closed():
    one = Sandbox(LIMITS)
    run(one, "print(1)")
    launcher = one._process.pid
    [keeper] = [int(word) for word in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]
    one.close()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{keeper}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{keeper}").exists()


def test_x1_nothing_is_left_running_when_its_owner_is_killed():
    """kill -9 of the process that asked, while an answer runs."""
    reading, writing = os.pipe()
    owner = os.fork()
    if owner == 0:
        one = Sandbox(Limits(steps=10**9))
        run(one, "print(1)")
        os.write(writing, str(one._process.pid).encode())
        run(one, "while True: pass")
        os._exit(0)
    launcher = int(os.read(reading, 20))
    time.sleep(0.3)
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{launcher}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{launcher}").exists()


# Tampering with the result

QUESTION = Row("double it", [([1], 2), ([21], 42)], "f")
FORGERIES = {
    "equal to anything": "class A:\n  def __eq__(self, o): return True\ndef f(x): return A()",
    "an int equal to all": "class A(int):\n  __hash__ = None\n  def __eq__(self, o): return 1\ndef f(x): return A(7)",
    "a list equal to anything": "class A(list):\n  def __eq__(self, o): return True\ndef f(x): return A()",
    "early exit": "exit(0)",
    "exit in the call": "def f(x): raise SystemExit(0)",
    "printed results": "def f(x): print('[\"value\", 2]'); return 0",
    "rebound": "def f(x): return 0\nlen = sum = print = lambda *a: 2\n__name__",
    "the next test's input": "seen = []\ndef f(x):\n  seen.append(x)\n  return seen",
    "nothing": "",
    "another name": "def g(x): return 2 * x",
    "true": "def f(x): return True",
    "a text": "def f(x): return str(2 * x)",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_x2_only_the_right_values_pass(sandbox, name):
    assert CodeQuestions([QUESTION], "fraction", sandbox).grade(0, FORGERIES[name]) == 0


def test_x2_the_control_passes(sandbox):
    assert CodeQuestions([QUESTION], "all", sandbox).grade(0, "def f(x): return 2 * x") == 1_000_000


def test_x2_what_is_expected_never_enters_the_sandbox(sandbox):
    """Everything that the worker's process holds is searched for a secret that only the expected result contains."""
    secret = "expected-9f3a"
    row = Row("say it", [(["given-77c1"], secret)], "f")
    sent = []
    real = sandbox._send
    sandbox._send = lambda data: (sent.append(data), real(data))[1]
    try:
        assert CodeQuestions([row], "all", sandbox).grade(0, f"def f(x): return '{secret}'") == 1_000_000
        assert CodeQuestions([row], "all", sandbox).grade(0, "def f(x): return x") == 0
    finally:
        del sandbox._send
    assert b"given-77c1" in sent[1]
    assert secret.encode() not in sent[1]


def test_x2_lines_forged_by_an_escaped_answer_are_values_at_most(sandbox, monkeypatch):
    """Who writes to the result's descriptor directly says what a call returned, which it could have returned as well."""
    from environments import sandbox as module

    forged = b'["value", 2]\n["value", 42]\n["value", 1]\nnonsense\n'
    assert [one.value for one in module._read_outcomes(forged, 2)] == [2, 42]
    for bad in (
        b"",
        b"null",
        b"[]",
        b'["value"]',
        b"[" * 100_000,
        b'{"a": 1}',
        b"\xff",
        b'["limit", "x"]\n["value", 2]',
    ):
        assert all(one.error for one in module._read_outcomes(bad, 3))


def test_x3_the_same_outcome_a_hundred_times(sandbox):
    """Near the step limit, where a clock would waver."""
    calls = [FunctionCall("f", (n,)) for n in (100, 15_000, 50_000, 150_000)]
    source = "def f(n):\n  x = {}\n  for i in range(n): x[i % 7] = i\n  return sorted(x)"
    first = [(one.value, one.error) for one in sandbox.run(source, calls)]
    assert [bool(error) for _, error in first] == [False, False, False, True]
    for _ in range(100 if os.environ.get("CI") else 10):
        assert [(one.value, one.error) for one in sandbox.run(source, calls)] == first
