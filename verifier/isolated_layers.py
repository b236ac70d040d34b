"""The kernel's side of the judging process: no network, and limits on what one job may use.

`start_keeper` is called once, by a process with one thread, before anything is imported that starts threads (numpy does; this
module imports nothing of ours). Preferred is a user namespace with an empty network namespace in it: there is no interface,
and the process has no right over the machine's own, even when the operator is root. All ids stay mapped to themselves, so
that the sandbox of the code environment can make its own namespaces inside. Where the kernel refuses that, a filter refuses
to make any socket but local ones. Linux on x86-64 or aarch64. Neighbours: verifier.isolated_main uses this;
environments.jail, which runs code and does not only read data, is stricter.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path

_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2
_AF_UNIX = 1
#: Per machine: audit architecture, and the numbers of socket and io_uring_setup.
_MACHINES = {"x86_64": (0xC000003E, 41, 425), "aarch64": (0xC00000B7, 198, 425)}
#: System calls from here on up belong to the x32 table of x86-64, which would go round the filter.
_X32_BIT = 0x40000000

#: Files a judging process may have open, and the longest it may write: nothing it does needs to.
OPEN_FILES_MAX = 512
FILE_BYTES_MAX = 1 << 20

_LIBC = ctypes.CDLL(None, use_errno=True)


def _require(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def start_keeper(methods: tuple[str, ...]) -> tuple[socket.socket, str]:
    """The keeper's control socket, which was its standard input, and how the network was cut off.

    Ends the process, with the reason on the socket, where that cannot be done.
    """
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        return control, cut_network(methods)
    except OSError as error:
        say(control, {"missing": str(error)})
        sys.exit(1)


def say(control: socket.socket, message: dict[str, object]) -> None:
    """One line of JSON to the verifier."""
    control.sendall(json.dumps(message).encode() + b"\n")


def cut_network(methods: tuple[str, ...]) -> str:
    """Leave this process, and what it starts, without a network; returns the method that worked.

    Args:
        methods: of "namespace", "filter" and "none", tried in this order. "none" leaves the network as it is.

    Raises:
        OSError: when the last of them is refused, with the reasons of all.
    """
    ways: dict[str, Callable[[], None]] = {
        "namespace": _enter_namespace,
        "filter": _filter_sockets,
        "none": lambda: None,
    }
    refused = []
    for method in methods:
        reason = _try_out(ways[method])
        if not reason:
            ways[method]()
            return method
        refused.append(f"{method}: {reason}")
    raise OSError(errno.EPERM, "; ".join(refused))


def _try_out(way: Callable[[], None]) -> str:
    """What goes wrong in a fork of this process, empty when it works: half a namespace could not be left again."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            way()
        except Exception as error:
            os.write(writing, (str(error) or type(error).__name__).encode()[:1000])
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        reason = pipe.read().decode(errors="replace")
    _, status = os.waitpid(pid, 0)
    return reason or ("" if status == 0 else f"ended with status {status}")


def _enter_namespace() -> None:
    before = os.readlink("/proc/self/ns/net")  # noqa: PTH115
    if os.geteuid() == 0:
        _unshare_as_root()
    else:
        uid, gid = os.geteuid(), os.getegid()
        _require(_LIBC.unshare(_NEW_USER | _NEW_NET), "unshare user and network namespace")
        _write_maps("self", f"{uid} {uid} 1", f"{gid} {gid} 1", deny_groups=True)
    if os.readlink("/proc/self/ns/net") == before:  # noqa: PTH115
        raise OSError(errno.EPERM, "the network namespace did not change")


def _unshare_as_root() -> None:
    """Into a user namespace with every id mapped to itself, which only a process outside of it may write."""
    go_read, go_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(go_write)
            if os.read(go_read, 1):
                maps = [_same_ids(name) for name in ("uid_map", "gid_map")]
                _write_maps(str(os.getppid()), *maps, deny_groups=False)
                code = 0
        finally:
            os._exit(code)
    os.close(go_read)
    try:
        _require(_LIBC.unshare(_NEW_USER | _NEW_NET), "unshare user and network namespace")
        os.write(go_write, b"g")
    finally:
        os.close(go_write)
        _, status = os.waitpid(pid, 0)
    if status:
        raise OSError(errno.EPERM, "the ids of the user namespace could not be mapped")


def _same_ids(name: str) -> str:
    """The ids of this process's own namespace, each to itself."""
    rows = [line.split() for line in Path(f"/proc/self/{name}").read_text().splitlines()]
    return "\n".join(f"{row[0]} {row[0]} {row[2]}" for row in rows)


def _write_maps(process: str, uids: str, gids: str, *, deny_groups: bool) -> None:
    folder = Path("/proc") / process
    if deny_groups:
        (folder / "setgroups").write_text("deny")
    (folder / "uid_map").write_text(uids)
    (folder / "gid_map").write_text(gids)


def _filter_sockets() -> None:
    """From here on no socket can be made but local ones, by this process or any that it starts."""
    if platform.machine() not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no numbers of system calls for {platform.machine()}")
    architecture, socket_call, ring_call = _MACHINES[platform.machine()]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x00050000 | errno.EACCES, 0x80000000
    # `struct seccomp_data`: number at 0, architecture at 4, low word of the first argument at 16.
    lines = [
        (load, 0, 0, 4),
        (equal, 1, 0, architecture),
        (give, 0, 0, kill),
        (load, 0, 0, 0),
        (at_least, 5, 0, _X32_BIT),
        (equal, 4, 0, ring_call),
        (equal, 0, 2, socket_call),
        (load, 0, 0, 16),
        (equal, 0, 1, _AF_UNIX),
        (give, 0, 0, allow),
        (give, 0, 0, refuse),
    ]
    program = b"".join(struct.pack("HBBI", *line) for line in lines)
    code = ctypes.create_string_buffer(program, len(program))
    fprog = struct.pack("HxxxxxxP", len(lines), ctypes.addressof(code))
    _require(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    _require(_LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, fprog, 0, 0), "prctl(PR_SET_SECCOMP)")


def die_with_parent() -> None:
    """Killed as soon as the thread that forked this process is gone."""
    _require(_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def limit_process() -> None:
    """Limits of a judging process for good: no core dump, few files, and none that grows. Also no way to gain rights."""
    _require(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    files = min(OPEN_FILES_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    for name, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, FILE_BYTES_MAX),
        (resource.RLIMIT_NOFILE, files),
    ):
        resource.setrlimit(name, (limit, limit))


def limit_memory(more_bytes: int) -> None:
    """Let the address space grow by so many bytes from here; 0 lifts the limit.

    The soft limit alone: what this process starts may set its own.
    """
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = read_memory("self")[0] + more_bytes if more_bytes else hard
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def limit_cpu(seconds: float) -> None:
    """End this process when it has used so many CPU seconds from here; 0 lifts the limit.

    A timer and not RLIMIT_CPU, which processes that live on between jobs (a grader, a sandbox) would inherit.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)


def read_memory(process: int | str) -> tuple[int, int]:
    """Address space and resident memory of a process, in bytes. Raises `OSError` when it is gone."""
    fields = Path(f"/proc/{process}/statm").read_text().split()
    return int(fields[0]) * resource.getpagesize(), int(fields[1]) * resource.getpagesize()
