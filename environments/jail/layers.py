"""The kernel's side of the sandbox: namespaces, an empty file system, limits, and a list of the system calls that remain.

Each function puts one layer in place or raises `OSError` with the call that failed; nothing is skipped in silence. They
are called once, in the order of this module, by a process with one thread. Linux on x86-64 or aarch64.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct

#: What the sandbox's processes are, outside of it or within its user namespace.
NOBODY = 65_534

_NEW_NS, _NEW_UTS, _NEW_IPC, _NEW_USER, _NEW_PID, _NEW_NET = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_REC, _MS_PRIVATE = 1, 2, 4, 8, 32, 16384, 1 << 18
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2
_ADDR_NO_RANDOMIZE = 0x0040000
_CAPABILITY_VERSION = 0x20080522

_NAMESPACES = {"mounts": "mnt", "network": "net", "ipc": "ipc", "host name": "uts", "user": "user"}

#: Per machine: audit architecture, pivot_root, and the system calls a worker may still make.
_MACHINES = {
    "x86_64": (
        0xC000003E,
        155,
        {"mmap": 9, "mprotect": 10},
        # write munmap brk rt_sigaction rt_sigprocmask rt_sigreturn mremap madvise exit sigaltstack futex restart_syscall
        # clock_gettime exit_group getrandom
        (1, 11, 12, 13, 14, 15, 25, 28, 60, 131, 202, 219, 228, 231, 318),
    ),
    "aarch64": (
        0xC00000B7,
        41,
        {"mmap": 222, "mprotect": 226},
        (64, 215, 214, 134, 135, 139, 216, 233, 93, 132, 98, 128, 113, 94, 278),
    ),
}

_LIBC = ctypes.CDLL(None, use_errno=True)


def _require(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _machine() -> tuple[int, int, dict[str, int], tuple[int, ...]]:
    if platform.machine() not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no list of system calls for {platform.machine()}")
    return _MACHINES[platform.machine()]


def fix_addresses() -> bool:
    """Switch address randomisation off for programs started from here; False where that is refused."""
    current = int(_LIBC.personality(0xFFFFFFFF))
    return current >= 0 and _LIBC.personality(current | _ADDR_NO_RANDOMIZE) >= 0


def enter_namespaces() -> list[str]:
    """Own mounts, processes (from the next fork on), network, IPC and host name; names of those that are now others.

    A user namespace too where root's rights are not there.
    """
    before = _read_namespaces()
    flags = _NEW_NS | _NEW_UTS | _NEW_IPC | _NEW_PID | _NEW_NET
    uid, gid = os.geteuid(), os.getegid()
    if uid != 0 or _LIBC.unshare(flags) != 0:
        _require(_LIBC.unshare(flags | _NEW_USER), "unshare with a user namespace")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {uid} 1"), ("gid_map", f"{NOBODY} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123
                file.write(text)
    after = _read_namespaces()
    return [name for name in _NAMESPACES if before[name] != after[name]]


def _read_namespaces() -> dict[str, str]:
    return {name: os.readlink(f"/proc/self/ns/{link}") for name, link in _NAMESPACES.items()}  # noqa: PTH115


def hide_files() -> None:
    """Replace the whole file system by an empty directory that cannot be written to."""
    _require(_LIBC.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "mount / private")
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    _require(_LIBC.mount(b"tmpfs", b"/tmp", b"tmpfs", flags, b"size=4k,nr_inodes=2,mode=0555"), "mount a tmpfs")
    os.chdir("/tmp")
    _require(_LIBC.syscall(_machine()[1], b".", b"."), "pivot_root")
    _require(_LIBC.umount2(b".", _MNT_DETACH), "umount the old root")
    os.chdir("/")
    _require(_LIBC.mount(b"none", b"/", None, flags | _MS_REMOUNT | _MS_RDONLY, None), "remount / read-only")


def die_with_parent() -> None:
    """Killed as soon as the process that forked this one is gone."""
    _require(_LIBC.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def get_memory_bytes() -> int:
    """Address space of this process."""
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[0]) * resource.getpagesize()


def limit_resources(memory_bytes: int, cpu_s: int) -> None:
    """Address space and CPU seconds of this process; no files, no further processes, no core dumps."""
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_STACK: 8 << 20,
        resource.RLIMIT_NOFILE: 4,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for name, limit in limits.items():
        resource.setrlimit(name, (limit, limit))


def drop_privileges() -> None:
    """Nobody's user and group, no capability, and no way to gain one."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    header = struct.pack("II", _CAPABILITY_VERSION, 0)
    _require(_LIBC.capset(header, bytes(24)), "capset")
    _require(_LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")
    _require(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")


def filter_calls() -> None:
    """From here on only the listed system calls work; every other gives EPERM, and no memory becomes executable."""
    program = _make_filter(*_machine())
    code = ctypes.create_string_buffer(program, len(program))
    fprog = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    _require(_LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, fprog, 0, 0), "prctl(PR_SET_SECCOMP)")


def _make_filter(architecture: int, _: int, mapping: dict[str, int], allowed: tuple[int, ...]) -> bytes:
    """Classic BPF over `struct seccomp_data`: number at 0, architecture at 4, low word of the third argument at 32."""
    load, equal, any_bit, give = 0x20, 0x15, 0x45, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
    rules = len(mapping) + len(allowed)
    lines = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, kill), (load, 0, 0, 0)]
    # Behind the comparisons stand: refuse, allow, then the test for PROT_EXEC.
    targets = [(number, 2) for number in mapping.values()] + [(number, 1) for number in allowed]
    lines += [(equal, rules - 1 - i + target, 0, number) for i, (number, target) in enumerate(targets)]
    lines += [(give, 0, 0, refuse), (give, 0, 0, allow), (load, 0, 0, 32), (any_bit, 0, 1, 4)]
    lines += [(give, 0, 0, refuse), (give, 0, 0, allow)]
    return b"".join(struct.pack("HBBI", *line) for line in lines)
