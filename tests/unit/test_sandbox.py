"""The sandbox: ordinary programs give what they give anywhere, work is counted, limits are the answer's, time is ours."""

# ruff: noqa: E501
from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from environments import sandbox as sandbox_module
from environments.sandbox import FunctionCall, Limits, Outcome, ProgramRun, Sandbox
from protocol.errors import ConfigError, Fault

SMALL = Limits(steps=200_000, memory_bytes=64 << 20, cpu_s=60, wall_s=120)


@pytest.fixture(scope="module")
def sandbox():
    made = Sandbox(SMALL)
    yield made
    made.close()


def run_program(sandbox, source, stdin=""):
    [outcome] = sandbox.run(source, [ProgramRun(stdin)])
    return outcome


PROGRAMS = {
    "loops": """
total = 0
for i in range(10):
    if i % 2: continue
    if i > 7: break
    total += i
else:
    total = -1
while total > 3:
    total -= 4
else:
    print("done")
print(total, [x * y for x in range(3) for y in range(3) if x != y], {x % 3 for x in range(9)}, {k: v for k, v in zip("ab", [1, 2])})
""",
    "assignments": """
a = b = [1, 2, 3]
a[0] += 5; a[-1] *= 2
(c, *d), e = [1, 2, 3], "x"
x = {"n": {"m": 1}}
x["n"]["m"] += 1
def calls(log=[]):
    log.append(len(log)); return log
calls()[calls()[0]] += 10
a[1:2] = [7, 8, 9]
del a[0], x["n"]
if (n := len(a)) > 2: print(n)
a += (4,)
t: int = 3
u: "List[int]"
s = "ab"; s *= 2; s += "!"
i = 7; i //= 2; i **= 3; i <<= 2; i |= 1; i ^= 3; i &= 0xff; i %= 50; i >>= 1; f = 1.0; f /= 4; f -= 1
print(a, b is a, c, d, e, x, calls(), t, s, i, f)
""",
    "classes": """
from functools import total_ordering, lru_cache
@total_ordering
class P:
    count = 0
    __slots__ = ("x", "_y")
    def __init__(self, x): self.x = x; self._y = None; P.count += 1
    @property
    def y(self): return self.x * 2
    @classmethod
    def make(cls, *a): return cls(*a)
    @staticmethod
    def twice(v): return v + v
    def __eq__(self, o): return self.x == o.x
    def __lt__(self, o): return self.x < o.x
    def __hash__(self): return hash(self.x)
    def __repr__(self): return f"P({self.x!r})"
    def __call__(self, k=1, *a, **kw): return self.x + k + len(a) + len(kw)
    def __iter__(self): yield from range(self.x)
    def __contains__(self, v): return v == self.x
    def __getitem__(self, i): return i if not isinstance(i, slice) else (i.start, i.stop)
    def __add__(self, o): return P(self.x + o.x)
    def __iadd__(self, o): self.x += 100; return self
class Q(P):
    def __init__(self, x):
        super().__init__(x)
        self.__z = 5
    def z(self): return self.__z
ps = sorted([P.make(3), Q(1), P(2)])
q = ps[0]; q += q
print(ps, max(ps), P(1) == P(1), len({P(1), P(1)}), P(4).y, P.twice(3), P(1)(2, 3, 4, a=5), list(P(3)), 3 in P(3), P(2)[1:3], P(1) + P(2), q.z(), P.count)
class Node:
    def __init__(self): self.next = None
a, b = Node(), Node()
print(len({a, b, a}), a == b, {a: 1}[a], isinstance(b, Node), type(a).__name__)
class E(ValueError):
    pass
try:
    raise E("no")
except (KeyError, ValueError) as error:
    print(type(error).__name__, error)
finally:
    print("finally")
@lru_cache(maxsize=None)
def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
print(fib(60))
class C:
    def __enter__(self): print("in"); return self
    def __exit__(self, *a): print("out", a[0] is ZeroDivisionError); return True
with C() as c:
    1 / 0
""",
    "generators": """
def gen(n):
    try:
        got = yield 0
        while n: n -= 1; got = yield (got or 0) + n
    finally: print("closed")
g = gen(3)
print(next(g), g.send(10), g.send(None)); g.close()
def outer():
    r = yield from inner(); print("r", r)
def inner():
    yield 1; return 2
print(list(outer()), sum(i * i for i in range(5)), *map(str, filter(None, [0, 1, 2])))
it = iter(range(7)); print(list(zip(it, it)), next(it, "end"))
print(any(x > 2 for x in [1, 2, 3]), all([]), list(enumerate("ab", 1)), list(reversed([1, 2])))
""",
    "library": """
import math, itertools, collections, heapq, bisect, operator, string, copy, functools, sys
from collections import *
from typing import List, Optional
import itertools as it
def f(x: List[int], y: Optional[int] = None) -> "int": return len(x)
print(f([1]), math.gcd(12, 18), math.comb(5, 2), math.factorial(10), math.isqrt(17), math.prod([1, 2, 3]), round(math.pi, 3))
print(list(itertools.permutations([1, 2, 3], 2)), list(it.product("ab", repeat=2)), list(it.chain([1], [2])), list(it.islice(it.count(5), 2)))
print([(k, list(g)) for k, g in it.groupby([1, 1, 2])], list(it.accumulate([1, 2, 3])), list(it.zip_longest([1], [2, 3])))
c = Counter("hello"); d = defaultdict(list); d["a"].append(1); q = deque([1, 2], maxlen=3); q.appendleft(0)
print(c.most_common(1), dict(d), list(q), OrderedDict(a=1), c + Counter("l"))
h = []
for x in [3, 1, 2]: heapq.heappush(h, (x, "v"))
print(heapq.heappop(h), heapq.nlargest(1, [1, 5, 2]), bisect.bisect([1, 3], 2), operator.itemgetter(1)([4, 5]), operator.add(1, 2))
x = [[1], {"k": {2}}]; y = copy.deepcopy(x); y[0].append(2); z = copy.copy(x); print(x, y, z[0] is x[0])
print(functools.reduce(lambda a, b: a + b, [1, 2, 3]), string.digits, sorted("bca", key=lambda s: -ord(s)), min([3, 1], key=abs))
print(pow(2, 10), pow(3, 5, 7), divmod(17, 5), 2 ** -1, (-8) ** 0.5 == 8 ** 0.5 * 1j, sum([[1], [2]], []), sum([0.5, 1]), abs(-3), hash(5))
print("%s-%05.2f" % ("a", 3.14159), "{:>5}|{}".format(1, "b"), f"{3.14159:.{2}f} {'x'!r:>5}", "a,b".split(","), "-".join(["x", "y"]), "abc"[::-1])
print(bytes([1, 2]), bytearray(b"ab"), "é".encode(), chr(233), ord("a"), hex(255), bin(5), int("ff", 16), repr("a"), ascii("é"))
print(1 < 2 < 3 != 4, not 1 in [2], 3 not in range(3), "a" in "abc", None is None, [1, [2]] == [1, [2]], (1, 2) < (1, 3), {1} <= {1, 2}, {1, 2} & {2} | {3})
print([*range(3), *"ab"], {**{"a": 1}, "b": 2}, (lambda *a, k=1, **kw: (a, k, kw))(*[1, 2], k=3, **{"z": 4}))
match [1, 2, 3]:
    case [a, *rest]: print(a, rest)
match {"k": 1, "z": 2}:
    case {"k": v, **others}: print(v, others)
match 5:
    case str(s): print("text", s)
    case int(n): print("number", n)
match True:
    case bool(): print("truth")
def decorate(f):
    @functools.wraps(f)
    def made(*a): return f(*a)
    return made
@decorate
def named(x):
    "what it does"
    return x
print(named.__name__, named.__doc__, named(1), functools.partial(max, 3)(4), functools.reduce(max, [1, 3, 2]))
print(list(map("{0[0]}-{1.real}".format, ["ab"], [2])), getattr(3, "real"), [*map(functools.partial(int, base=2), ["11"])])
sys.setrecursionlimit(10**6)
def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
print(depth(500))
""",
    "input": """
import sys
n = int(input())
rows = [list(map(int, input().split())) for _ in range(n)]
print(sum(map(sum, rows)), end="!\\n")
rest = sys.stdin.read().split()
sys.stdout.write(" ".join(rest) + "\\n")
print(*rest, sep="-")
try: input()
except EOFError: print("end")
if __name__ == "__main__": print("main")
""",
    "scopes": """
count = 0
def make():
    n = 0
    def add(k=1):
        nonlocal n
        global count
        n += k; count += 1
        return n
    return add
a = make(); a(); a(5); print(a(), count)
xs = [lambda i=i: i for i in range(3)]; print([x() for x in xs])
def f(a, /, b, *, c=3): return a, b, c
print(f(1, b=2)); assert f(1, 2, c=4)[2] == 4, "no"
class K:
    v = [i for i in range(3)]
    w: int = 4
    w += 1
print(K.v, K.w, [i for i in range(3) if i if i > 1], {1: 2}.get(1), [][:1], [1, 2, 3][-2:], (1, 2)[::-1])
""",
}
STDIN = "2\n1 2\n3 4\nx y\nz\n"


def run_natively(source):
    """In this interpreter, without any guard."""
    out, old = io.StringIO(), (sys.stdin, sys.getrecursionlimit())
    sys.stdin = io.StringIO(STDIN)
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(source, "<native>", "exec"), {"__name__": "__main__"})
    finally:
        sys.stdin = old[0]
        sys.setrecursionlimit(old[1])
    return out.getvalue()


@pytest.mark.parametrize("name", PROGRAMS)
def test_ordinary_programs_do_what_they_do_anywhere(sandbox, name):
    assert run_program(sandbox, PROGRAMS[name], STDIN) == Outcome(run_natively(PROGRAMS[name]))


def test_functions_keep_their_state_and_their_errors_apart(sandbox):
    source = "seen = []\ndef f(x):\n    seen.append(x)\n    return [len(seen), 1 // x, (x, {'k': None})]"
    calls = [FunctionCall("f", (2,)), FunctionCall("f", (0,)), FunctionCall("f", (1,)), FunctionCall("g", ())]
    first, second, third, fourth = sandbox.run(source, calls)
    assert first == Outcome([1, 0, [2, {"k": None}]])
    assert second.error == "error: ZeroDivisionError"
    assert third == Outcome([3, 1, [1, {"k": None}]])
    assert "defines no g" in fourth.error


def test_no_state_is_left_for_the_next_run(sandbox):
    sandbox.run("import collections, math\ncollections.x = 1\nmath.pi = 3\nz = 1", [ProgramRun("")])
    left = "import collections, math\nprint(hasattr(collections, 'x'), math.pi > 3.1)\nprint(z)"
    assert "z" in run_program(sandbox, left).error
    assert run_program(sandbox, left.replace("print(z)", "")) == Outcome("False True\n")


@pytest.mark.parametrize("value", ["object()", "{1, 2}", "{(1,): 2}", "b'x'", "1j", "f", "float", "['x' * 50000] * 3"])
def test_what_json_does_not_have_is_no_result(sandbox, value):
    [outcome] = sandbox.run(f"def f(): return {value}", [FunctionCall("f", ())])
    assert outcome.error.startswith("error")


def test_steps_are_counted_alike_every_time():
    """The budget at which a program just passes is the same number on every run, and one less always fails."""
    source = "def f(n):\n    return sum(len(str(i)) for i in range(n)) + len([i * i for i in range(n)])"

    def passes(steps):
        with contextlib.closing(Sandbox(SMALL._replace(steps=steps))) as one:
            return not one.run(source, [FunctionCall("f", (50,))])[0].error

    low, high = 1, 1024
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if passes(middle) else (middle, high)
    assert [passes(high), passes(low)] * 2 == [True, False] * 2


def test_a_busy_machine_changes_no_outcome(sandbox):
    """The same program with and without two processes that take the processor away."""
    source = "def f(n):\n    x = 0\n    for i in range(n):\n        x += i\n    return x"
    calls = [FunctionCall("f", (90_000,)), FunctionCall("f", (90_000,)), FunctionCall("f", (90_000,))]
    alone = sandbox.run(source, calls)
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        assert [sandbox.run(source, calls) for _ in range(5)] == [alone] * 5
    finally:
        for one in burners:
            one.kill()
            one.wait()
    assert [outcome.error for outcome in alone] == ["", "", "limit: steps"]


def test_the_memory_of_a_run_does_not_depend_on_earlier_ones():
    source = "def f(n): return len(bytearray(n))"
    limits = Limits(steps=10**9, memory_bytes=32 << 20)
    sandbox, other = Sandbox(limits), Sandbox(limits)

    def fits(one, size):
        [outcome] = one.run(source, [FunctionCall("f", (size,))])
        return not outcome.error

    try:
        low, high = 0, 64 << 20
        while high - low > 4096:
            middle = (low + high) // 8192 * 4096
            low, high = (middle, high) if fits(sandbox, middle) else (low, middle)
        for turn in range(300):
            sandbox.run(f"print('x' * {turn * 200})", [ProgramRun("y" * turn * 1000)] * 3)
        assert fits(sandbox, low)
        assert not fits(sandbox, high)
        assert fits(other, low)
        assert not fits(other, high)
    finally:
        sandbox.close()
        other.close()


def test_the_order_of_a_set_is_fixed():
    def show():
        with contextlib.closing(Sandbox(SMALL)) as one:
            return run_program(
                one, "class N: pass\nprint({'a', 'b', 'c', 'd', 'spam'}, {'x': {1}}, len({N(), N()}), [N()])"
            )

    assert show() == show() == show()
    assert "object at 0x" not in show().value


def test_threads_share_one(sandbox):
    results = {}

    def work(n):
        results[n] = sandbox.run("def f(x): return x * x", [FunctionCall("f", (n,))])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(12)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert results == {n: [Outcome(n * n)] for n in range(12)}


def test_a_forked_process_gets_a_sandbox_of_its_own(sandbox):
    assert run_program(sandbox, "print(1)") == Outcome("1\n")
    pid = os.fork()
    if pid == 0:
        good = run_program(sandbox, "print(2)") == Outcome("2\n")
        sandbox.close()
        os._exit(0 if good else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert run_program(sandbox, "print(3)") == Outcome("3\n")


def test_a_run_takes_milliseconds(sandbox):
    """The best of 40, so that other work on the machine does not decide, is far below the 50 ms that an answer may cost."""
    times = []
    for _ in range(40):
        started = time.perf_counter()
        sandbox.run("def f(x): return x", [FunctionCall("f", (1,))])
        times.append(time.perf_counter() - started)
    assert min(times) < 0.05


def test_time_that_ran_out_is_a_fault():
    with contextlib.closing(Sandbox(Limits(steps=10**9, wall_s=1))) as one, pytest.raises(Fault, match="wall"):
        run_program(one, "while True: pass")


def test_processor_time_that_ran_out_is_a_fault():
    with contextlib.closing(Sandbox(Limits(steps=10**9, cpu_s=1))) as one, pytest.raises(Fault, match="signal"):
        run_program(one, "while True: pass")


def test_a_run_killed_from_outside_is_a_fault_and_the_next_one_works():
    with contextlib.closing(Sandbox(Limits(steps=10**9))) as one:
        run_program(one, "print(1)")
        killer = threading.Timer(0.3, one._process.kill)
        killer.start()
        with pytest.raises(Fault, match="ended or stopped"):
            run_program(one, "while True: pass")
        assert run_program(one, "print(2)") == Outcome("2\n")


def test_probe_names_the_layers(sandbox):
    layers = sandbox.probe()
    assert layers.missing == ""
    for name in ("mounts", "processes", "network", "ipc"):
        assert f"namespace of {name}" in layers.active
    assert {"no files", "no sockets", "no processes", "no signals", "no new rights", "bounded memory"} <= set(
        layers.active
    )


def test_nothing_runs_where_a_layer_is_refused(monkeypatch):
    """A kernel that lets nobody unshare: a limit of zero namespaces, as the error comes back."""
    refuse = (
        "import sys, errno, os; sys.path.append(sys.argv[1]); from jail import keeper, layers\n"
        "layers._LIBC = type('L', (), {'unshare': lambda self, f: -1, 'personality': layers._LIBC.personality})()\n"
        "keeper.main()"
    )
    monkeypatch.setattr(sandbox_module, "_BOOT", refuse)
    one = Sandbox(SMALL)
    with pytest.raises(ConfigError, match="user namespaces"):
        run_program(one, "print(1)")
    assert "unshare" in one.probe().missing
    assert one.probe().active == ()


def test_calls_of_two_kinds_or_too_many_are_refused(sandbox):
    for calls in ([], [FunctionCall("f", ()), ProgramRun("")], [ProgramRun("")] * 257):
        with pytest.raises(ConfigError, match="calls"):
            sandbox.run("", calls)


def test_a_user_without_rights_can_use_it(monkeypatch, request):
    """The keeper started as nobody, which takes a user namespace, from a copy that nobody may read."""
    if os.geteuid() != 0:
        pytest.skip("not root: the rest of this module shows it")
    nobody = {"user": 65_534, "group": 65_534, "extra_groups": []}
    readers = [one for one in (sys.executable, "/usr/bin/python3.11", "/usr/bin/python3") if can_run(one, nobody)]
    if not readers:
        pytest.skip("no Python here can be run by another user")
    folder = Path(tempfile.mkdtemp(prefix="troth-sandbox-"))  # the runner's own folders are closed to other users
    request.addfinalizer(lambda: shutil.rmtree(folder))
    shutil.copytree(Path(sandbox_module.__file__).parent / "jail", folder / "jail")
    for path in (folder, folder / "jail"):
        path.chmod(0o755)
    monkeypatch.setattr(sandbox_module, "_FOLDER", folder)
    monkeypatch.setattr(sandbox_module.sys, "executable", readers[0])
    monkeypatch.setattr(sandbox_module.subprocess, "Popen", partial(subprocess.Popen, **nobody))
    with contextlib.closing(Sandbox(SMALL)) as one:
        assert run_program(one, "print(1)") == Outcome("1\n")
        assert {"namespace of user", "namespace of network", "no files", "no processes"} <= set(one.probe().active)


def can_run(reader, user):
    try:
        return subprocess.run([reader, "-S", "-c", "import json"], cwd="/", capture_output=True, **user).returncode == 0
    except OSError:
        return False
