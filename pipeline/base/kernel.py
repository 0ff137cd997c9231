"""Linux system calls that Python does not wrap, through ctypes: prctl, capabilities, Landlock and seccomp.

This module only makes the calls; `confinement` decides which ones. Numbers of system calls are known for x86_64 and
aarch64. A call that the kernel lacks, or that a container's own seccomp profile refuses, raises OSError;
`landlock_version` and `has_seccomp` tell beforehand what is supported.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import signal
import struct
from collections.abc import Iterable, Mapping, Sequence

_PDEATHSIG, _DUMPABLE, _NO_NEW_PRIVS = 1, 4, 38                     # options of prctl(2)
_CAPABILITY_VERSION = 0x20080522
#: file system rights that landlock(7) can restrict, as bits
(EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, REMOVE_DIR, REMOVE_FILE, MAKE_CHAR, MAKE_DIR, MAKE_REG, MAKE_SOCK, MAKE_FIFO,
 MAKE_BLOCK, MAKE_SYM, REFER, TRUNCATE) = (1 << bit for bit in range(15))
#: rights that a rule about a file (not a folder) may hold
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE
_SCOPE_SIGNAL = 2
#: versions of Landlock that introduced REFER, TRUNCATE and scopes
_REFER_SINCE, TRUNCATE_SINCE, _SCOPE_SINCE = 2, 3, 6
#: system call → its number on (x86_64, aarch64)
_CALLS = {
    "accept": (43, 202), "accept4": (288, 242), "add_key": (248, 217), "bind": (49, 200), "bpf": (321, 280),
    "capget": (125, 90), "capset": (126, 91), "chroot": (161, 51), "clone": (56, 220), "clone3": (435, 435),
    "connect": (42, 203), "delete_module": (176, 106), "execve": (59, 221), "execveat": (322, 281),
    "finit_module": (313, 273), "fsconfig": (431, 431), "fsmount": (432, 432), "fsopen": (430, 430),
    "fspick": (433, 433), "init_module": (175, 105), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425), "ioctl": (16, 29), "kexec_file_load": (320, 294), "kexec_load": (246, 104),
    "keyctl": (250, 219), "landlock_add_rule": (445, 445), "landlock_create_ruleset": (444, 444),
    "landlock_restrict_self": (446, 446), "listen": (50, 201), "mount": (165, 40), "mount_setattr": (442, 442),
    "move_mount": (429, 429), "open_by_handle_at": (304, 265), "open_tree": (428, 428), "openat": (257, 56),
    "openat2": (437, 437), "perf_event_open": (298, 241), "pidfd_getfd": (438, 438), "pivot_root": (155, 41),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "ptrace": (101, 117), "reboot": (169, 142),
    "request_key": (249, 218), "seccomp": (317, 277), "setns": (308, 268), "socket": (41, 198), "socketpair": (53, 199),
    "swapoff": (168, 225), "swapon": (167, 224), "truncate": (76, 45), "umount2": (166, 39), "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
#: number of open(2) on x86_64; aarch64 has only openat
_OPEN = 2
#: what a Python program needs (beside openat) that computes, reads files and uses the pipes that it was given: it
#: cannot change files' owners and modes, send signals, start threads or processes, or change another process's limits
#: and priority
_COMPUTING = {
    "brk": (12, 214), "clock_getres": (229, 114), "clock_gettime": (228, 113), "clock_nanosleep": (230, 115),
    "close": (3, 57), "exit": (60, 93), "exit_group": (231, 94), "fstat": (5, 80), "futex": (202, 98),
    "getcwd": (79, 17), "getdents64": (217, 61), "getegid": (108, 177), "geteuid": (107, 175), "getgid": (104, 176),
    "getpid": (39, 172), "getrandom": (318, 278), "gettid": (186, 178), "gettimeofday": (96, 169),
    "getuid": (102, 174), "lseek": (8, 62), "madvise": (28, 233), "mmap": (9, 222), "mprotect": (10, 226),
    "mremap": (25, 216), "munmap": (11, 215), "nanosleep": (35, 101), "newfstatat": (262, 79),
    "pread64": (17, 67), "read": (0, 63), "readlinkat": (267, 78), "restart_syscall": (219, 128),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sched_getaffinity": (204, 123),
    "sched_yield": (24, 124), "sigaltstack": (131, 132), "statx": (332, 291), "sysinfo": (99, 179), "uname": (63, 160),
    "write": (1, 64),
}
_ARCH = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}     # column of `_CALLS`, AUDIT_ARCH_*
#: bit in the call numbers of the x32 ABI, which are not in `_CALLS` and are all refused
_X32 = 0x40000000
#: flags of clone(2) that create namespaces: in a user namespace of its own a process has every capability
_NAMESPACES = 0x7E020000
#: flags of open(2) without which it can only read. An access mode of 3 opens for neither reading nor writing
_CHANGES = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC
#: requests of ioctl(2) that type into a terminal: a character, and on a console the text that is selected
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000                             # SECCOMP_RET_*
_REFUSE = _ERRNO | errno.EPERM


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _raise(what: str) -> None:
    number = ctypes.get_errno()
    raise OSError(number, f"{what}: {os.strerror(number)}")


def _number(name: str) -> int:
    if platform.machine() not in _ARCH:
        raise OSError(errno.ENOSYS, f"{name}: numbers of system calls of {platform.machine()} are not known here")
    return _CALLS[name][_ARCH[platform.machine()][0]]


def _call(name: str, *args: int | ctypes.Array[ctypes.c_char]) -> int:
    # all as unsigned longs: ctypes would pass a Python int as a C int
    words = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in args]
    result: int = _libc().syscall(ctypes.c_long(_number(name)), *words)
    if result < 0:
        _raise(name)
    return result


def _prctl(option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    if _libc().prctl(option, ctypes.c_ulong(value), zero, zero, zero) != 0:
        _raise(f"prctl({option})")


def signal_on_death_of_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send the signal `number` to this process the moment the thread that spawned it ends, however that
    thread ends."""
    _prctl(_PDEATHSIG, number)


def no_new_privileges() -> None:
    """Keep this process and the programs it starts from gaining rights (setuid). Landlock and seccomp require this."""
    _prctl(_NO_NEW_PRIVS, 1)


def not_dumpable() -> None:
    """Disable core dumps of this process, and keep other processes of the same user from reading its /proc/PID/environ
    and mem and from tracing it."""
    _prctl(_DUMPABLE, 0)


def keep_capabilities(numbers: Iterable[int]) -> None:
    """Drop all capabilities except those with these numbers."""
    mask = sum(1 << c for c in numbers)
    header = struct.pack("<Ii", _CAPABILITY_VERSION, 0)
    data = ctypes.create_string_buffer(24)
    _call("capget", ctypes.create_string_buffer(header), data)
    words = struct.unpack("<6I", data.raw)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    remaining = struct.pack("<6I", *(w & m for w, m in zip(words, (low, low, 0, high, high, 0))))
    _call("capset", ctypes.create_string_buffer(header), ctypes.create_string_buffer(remaining))


# -- Landlock --------------------------------------------------------------------------------------------------------
def landlock_version() -> int:
    """Return the version of the kernel's Landlock interface; 0 when the kernel has none."""
    try:
        return _call("landlock_create_ruleset", 0, 0, 1)
    except OSError:
        return 0


def landlock(handled: int, allowed: Mapping[str, int]) -> None:
    """Deny the file-system rights `handled` (bits of Landlock) to this thread and to all threads and processes it
    starts. The paths of `allowed` ({path: rights}) and everything below them keep their rights. Missing paths are
    skipped, and so are rights that this kernel's Landlock does not know. A denial cannot be lifted.

    The thread can no longer inspect processes outside its Landlock domain (ptrace, /proc/PID/environ). With version 6
    or later of Landlock, it cannot send signals to such processes either."""
    version = landlock_version()
    supported = ((1 << 13) - 1 | (REFER if version >= _REFER_SINCE else 0)
                 | (TRUNCATE if version >= TRUNCATE_SINCE else 0))
    # a ruleset that does not handle REFER denies every rename between folders
    handled = handled & supported | supported & REFER
    attributes = struct.pack("<QQQ", handled, 0, _SCOPE_SIGNAL)[:24 if version >= _SCOPE_SINCE else 8]
    ruleset = _call("landlock_create_ruleset", ctypes.create_string_buffer(attributes, len(attributes)),
                    len(attributes), 0)
    try:
        for path, rights in allowed.items():
            try:
                place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                rights &= handled if os.path.isdir(path) else handled & OF_FILES
                if rights:
                    rule = struct.pack("<Qi", rights, place)
                    _call("landlock_add_rule", ruleset, 1, ctypes.create_string_buffer(rule, len(rule)), 0)
            finally:
                os.close(place)
        _call("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)


# -- seccomp ---------------------------------------------------------------------------------------------------------
def has_seccomp() -> bool:
    """Whether the kernel can filter system calls so that denied calls fail with a given error (seccomp)."""
    try:
        return _call("seccomp", 2, 0, ctypes.create_string_buffer(struct.pack("<I", _ERRNO), 4)) == 0
    except OSError:
        return False


def deny_calls(names: Iterable[str]) -> None:
    """Make the system calls `names` fail with EPERM in all threads of this process and in all processes it starts. A
    denial cannot be lifted.

    Four other things are always denied:

    * new namespaces;
    * putting input into a terminal (TIOCSTI), because a shell in the terminal would run it;
    * opening a file with O_TRUNC but not for writing: this empties the file, and Landlock before version 3 allows it;
    * socket pairs other than Unix streams, because a datagram socket can send to any address."""
    column, program = _beginning()
    if platform.machine() == "x86_64":
        program += [_jump(_X32, 0, 1, test=_AT_LEAST), _answer(_REFUSE), *_refuse_emptying(_OPEN, flags_at=24)]
    for name in sorted(set(names)):
        program += [_jump(_CALLS[name][column], 0, 1), _answer(_REFUSE)]
    # clone3 and openat2 pass flags by pointer, which a filter cannot read; after ENOSYS callers use clone and openat
    for name in ("clone3", "openat2"):
        program += [_jump(_CALLS[name][column], 0, 1), _answer(_ERRNO | errno.ENOSYS)]
    program += _refuse_bits(_CALLS["clone"][column], 16, _NAMESPACES)
    program += _refuse_emptying(_CALLS["openat"][column], flags_at=32)
    program += [_jump(_CALLS["ioctl"][column], 0, 5), _load(24), _jump(_TIOCSTI, 1, 0), _jump(_TIOCLINUX, 0, 1),
                _answer(_REFUSE), _answer(_ALLOW)]
    program += [_jump(_CALLS["socketpair"][column], 0, 6), _load(16), _jump(1, 0, 3), _load(24), _mask(0xF),
                _jump(1, 1, 0), _answer(_REFUSE)]
    program.append(_answer(_ALLOW))
    _set_filter(program)


def allow_computing() -> None:
    """Allow all threads of this process only the system calls that a Python program needs to compute, to read files and
    to use the pipes that it has. All other calls fail with EPERM, and files can be opened for reading only. A denial
    cannot be lifted."""
    column, program = _beginning()
    for numbers in _COMPUTING.values():
        program += [_jump(numbers[column], 0, 1), _answer(_ALLOW)]
    _set_filter([*program, *_refuse_bits(_CALLS["openat"][column], 32, _CHANGES), _answer(_REFUSE)])


def _beginning() -> tuple[int, list[bytes]]:
    """Return the index of this machine's column in `_CALLS`, and the first instructions of a seccomp filter. These
    instructions refuse system calls of another architecture, such as those of 32-bit programs, because the same numbers
    mean other calls there. Then they load the number of the call for the instructions that follow."""
    column, architecture = _ARCH[platform.machine()]
    return column, [_load(4), _jump(architecture, 1, 0), _answer(_REFUSE), _load(0)]


def _refuse_bits(number: int, argument_at: int, bits: int) -> list[bytes]:
    """Return the part of a seccomp filter that decides about the system call `number`. The call is refused if its
    argument has one of `bits`, and otherwise allowed. `argument_at` is the argument's offset (see `_load`)."""
    return [_jump(number, 0, 4), _load(argument_at), _jump(bits, 0, 1, test=_ANY_BIT), _answer(_REFUSE),
            _answer(_ALLOW)]


def _refuse_emptying(number: int, flags_at: int) -> list[bytes]:
    """Return the part of a seccomp filter that decides about the system call `number` (open or openat). The call is
    refused if it would empty a file without opening it for writing, and otherwise allowed. `flags_at` is the offset of
    the call's flags (see `_load`)."""
    return [_jump(number, 0, 7), _load(flags_at), _jump(os.O_TRUNC, 0, 4, test=_ANY_BIT), _mask(os.O_ACCMODE),
            _jump(os.O_WRONLY, 2, 0), _jump(os.O_RDWR, 1, 0), _answer(_REFUSE), _answer(_ALLOW)]


def _set_filter(program: Sequence[bytes]) -> None:
    code = ctypes.create_string_buffer(b"".join(program), 8 * len(program))
    filter_ = struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(code))
    set_filter, all_threads = 1, 1
    thread = _call("seccomp", set_filter, all_threads, ctypes.create_string_buffer(filter_, len(filter_)))
    if thread != 0:
        raise OSError(errno.EBUSY, f"seccomp: thread {thread} has a filter of its own")


# classic BPF (seccomp(2)): each instruction is a code, two jump distances and a value
_EQUAL, _AT_LEAST, _ANY_BIT = 0x15, 0x35, 0x45


def _load(offset: int) -> bytes:
    """Return the seccomp filter (BPF) instruction that loads a word of struct seccomp_data. The system call's number is
    at offset 0, the architecture at 4, and the arguments, low words first, from 16 on."""
    return struct.pack("<HBBI", 0x20, 0, 0, offset)


def _jump(value: int, if_true: int, if_false: int, test: int = _EQUAL) -> bytes:
    return struct.pack("<HBBI", test, if_true, if_false, value)


def _mask(value: int) -> bytes:
    return struct.pack("<HBBI", 0x54, 0, 0, value)


def _answer(value: int) -> bytes:
    return struct.pack("<HBBI", 0x06, 0, 0, value)
