# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs a program that a model wrote, and says whether it passes a problem's tests. Linux on x86-64 only.

Program and tests run in two processes. The program's process can only compute (below): it answers calls of the
program's functions, or writes to standard output. The grading process runs the tests and compares. So a program can
neither announce success nor return an object that claims to equal everything. Only plain data of exact types comes
back: numbers, text, lists, tuples, dicts, sets.

Where bubblewrap works, both processes are in a jail (`jail.py`), which is the first wall. The second is `lock_down`:

    system calls   a list (seccomp), with the arguments of open, clone, fcntl and ioctl; all else is refused with EPERM:
                   no file is written, no process started or signalled, no socket opened; threads are allowed
    files          what Python reads by itself (Landlock): the interpreter and its packages, and numpy
    processes      nothing of any other is read (Landlock); no capabilities, no ptrace
    limits         CPU seconds, address space, open files, no core dump; prlimit is refused
    output         is read up to a limit, then the process is killed
"""

import base64
import ctypes
import functools
import importlib.machinery
import importlib.util
import io
import json
import os
import select
import site
import struct
import subprocess
import sys
import time
from collections.abc import Sequence

MAX_ANSWER = 1 << 20  # bytes of an answer, or of a program's standard output
MAX_DEPTH = 50
NEEDS = "no program can be run: the sandbox needs Linux on x86-64 with seccomp filters"

# ---- the program's process ---------------------------------------------------------------------------------------

# Numbers of x86-64 (the kernel's arch/x86/entry/syscalls/syscall_64.tbl).
ALLOWED = {
    "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8, "mmap": 9,
    "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
    "pread64": 17, "readv": 19, "writev": 20, "access": 21, "pipe": 22, "select": 23, "sched_yield": 24, "mremap": 25,
    "madvise": 28, "dup": 32, "dup2": 33, "nanosleep": 35, "getitimer": 36, "alarm": 37, "setitimer": 38, "getpid": 39,
    "exit": 60, "uname": 63, "getcwd": 79, "readlink": 89, "gettimeofday": 96, "getrusage": 98, "sysinfo": 99,
    "times": 100, "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "sigaltstack": 131,
    "arch_prctl": 158, "gettid": 186, "time": 201, "futex": 202, "sched_getaffinity": 204, "getdents64": 217,
    "restart_syscall": 219, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231,
    "newfstatat": 262, "readlinkat": 267, "faccessat": 269, "pselect6": 270, "ppoll": 271, "set_robust_list": 273,
    "dup3": 292, "pipe2": 293, "getrandom": 318, "membarrier": 324, "statx": 332, "rseq": 334, "faccessat2": 439,
}  # fmt: skip
OPEN, IOCTL, CLONE, FCNTL, OPENAT, CLONE3 = 2, 16, 56, 72, 257, 435
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CLONE_THREAD = 0x10000
# F_SETFL is allowed without O_ASYNC. F_SETOWN, F_SETSIG and the like let the kernel signal any process of the user.
F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC = 0, 1, 2, 3, 4, 1030
TCGETS, TIOCGWINSZ, FIONREAD, FIONCLEX, FIOCLEX = 0x5401, 0x5413, 0x541B, 0x5450, 0x5451
X86_64 = 0xC000003E
HAS_FILTER = sys.platform == "linux" and os.uname().machine == "x86_64"
ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
LOAD, EQUAL, SET, RETURN = 0x20, 0x15, 0x45, 0x06  # BPF: load word, jump if equal, jump if any bit set, return
Step = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def filter_program() -> bytes:
    """Assembles the seccomp filter of a graded program: bytes of an array of `struct sock_filter`."""

    def argument(number: int) -> Step:
        return LOAD, 0, 0, 16 + 8 * number

    def when(operand: int, then: list[Step], test: int = EQUAL) -> list[Step]:
        return [(test, 0, len(then), operand), *then]

    def allow(*values: int) -> list[Step]:
        return [step for value in values for step in when(value, [(RETURN, 0, 0, ALLOW)])]

    refuse, otherwise_allow = (RETURN, 0, 0, EPERM), (RETURN, 0, 0, ALLOW)
    set_flags = [argument(2), *when(os.O_ASYNC, [refuse], SET), otherwise_allow]
    steps: list[Step] = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, X86_64), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    steps += when(OPEN, [argument(1), *when(WRITES, [refuse], SET), otherwise_allow])
    steps += when(OPENAT, [argument(2), *when(WRITES, [refuse], SET), otherwise_allow])
    steps += when(CLONE, [argument(0), *when(CLONE_THREAD, [otherwise_allow], SET), refuse])
    steps += when(CLONE3, [(RETURN, 0, 0, ENOSYS)])
    steps += when(IOCTL, [argument(1), *allow(TCGETS, TIOCGWINSZ, FIONREAD, FIONCLEX, FIOCLEX), refuse])
    flags_alone = allow(F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC)
    steps += when(FCNTL, [argument(1), *flags_alone, *when(F_SETFL, set_flags), refuse])
    steps += [*allow(*ALLOWED.values()), refuse]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def readable(packages: list[str]) -> list[str]:
    """Lists the paths that a Python process has to read: its libraries, `packages`, the C library's files."""
    libraries = [f"{sys.base_prefix}/lib", f"{sys.base_prefix}/lib64", "/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    libraries += [*os.environ.get("LD_LIBRARY_PATH", "").split(":"), "/nix/store", "/etc/ld.so.cache"]
    found = [*libraries, "/usr/share/zoneinfo", *packages]
    return [path for path in dict.fromkeys(found) if path and os.path.exists(path)]


def landlock_abi() -> int:
    """Returns the version of the kernel's Landlock interface; 0: the kernel has none."""
    return max(0, _libc().syscall(444, None, ctypes.c_long(0), 1)) if sys.platform == "linux" else 0


def lock_down(packages: Sequence[str] = ()) -> None:
    """Restricts this process, for good, to computing and to reading Python's libraries and `packages`.

    Raises:
      OSError: the kernel lacks a feature that this needs.
    """
    if sys.platform != "linux":
        raise OSError(NEEDS)
    no_capabilities = (struct.pack("II", 0x20080522, 0), struct.pack("6I", *[0] * 6))
    _checked(_libc().capset(*no_capabilities))
    _checked(_libc().prctl(38, 1, 0, 0, 0))  # PR_SET_NO_NEW_PRIVS
    if abi := landlock_abi():
        _read_alone(readable([*sys.path, *packages, "/dev/null", "/dev/urandom"]), abi)
    if not HAS_FILTER:
        raise OSError(NEEDS)
    code = ctypes.create_string_buffer(filter_program())
    program = struct.pack("HxxxxxxQ", (len(code) - 1) // 8, ctypes.addressof(code))
    _checked(_libc().prctl(22, 2, ctypes.c_char_p(program), 0, 0))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def _read_alone(paths: list[str], abi: int) -> None:
    """Landlock: no file but for reading below `paths`, nothing of other processes, no TCP (4), no signals (6)."""
    # All of the first version's accesses; binding and connecting; signals and abstract sockets.
    handled = struct.pack("3Q", 0x1FFF, 3, 3)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    ruleset = _checked(_libc().syscall(444, handled, ctypes.c_long(len(handled)), 0))
    for path in paths:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", 4 | 8 if os.path.isdir(path) else 4, beneath)  # read files, and list folders
        _checked(_libc().syscall(445, ruleset, 1, rule, 0))
        os.close(beneath)
    _checked(_libc().syscall(446, ruleset, 0))
    os.close(ruleset)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), NEEDS)
    return result


def _limit(memory_mb: int, cpu_s: int) -> None:
    import resource

    limits = {"AS": memory_mb << 20, "CPU": cpu_s, "FSIZE": 0, "NOFILE": 32, "CORE": 0, "STACK": 64 << 20}
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def child() -> None:
    """Serves one task from standard input: a program whose functions are called, or one that reads and prints."""
    tasks = os.fdopen(os.dup(0), "rb")
    task = json.loads(tasks.readline())
    own_input = os.memfd_create("stdin")
    os.write(own_input, task.get("stdin", "").encode())
    os.lseek(own_input, 0, os.SEEK_SET)
    os.dup2(own_input, 0)
    answers = os.dup(1)
    if "stdin" not in task:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.setrecursionlimit(20_000)
    _limit(task["memory_mb"], task["cpu_s"])
    sys.meta_path.append(NumpyFinder(task["numpy"]))
    lock_down([task["numpy"], f"{task['numpy']}.libs"] if task["numpy"] else [])
    site.setquit()  # exit() and quit(), which Python has without -S
    names: dict = {"__name__": "__main__" if "stdin" in task else "solution"}
    for text in task["beside"]:
        define(text, names)
    if "stdin" in task:
        sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
        try:
            exec(compile(task["program"], "program", "exec"), names)
        except BaseException as error:
            if not task.get("tell"):
                raise
            if not isinstance(error, SystemExit) or error.code:
                print(f"{type(error).__name__}: {error}")
        sys.stdout.flush()
        return

    def answer(value: dict) -> None:
        text = json.dumps(value).encode() + b"\n"
        while text:
            text = text[os.write(answers, text) :]

    try:
        exec(compile(task["program"], "program", "exec"), names)
    except BaseException as error:
        answer({"error": f"{type(error).__name__}: {error}"[:300]})
        return
    answer({"value": None})
    for line in tasks:
        call = json.loads(line)
        try:
            kind, _, method = call["name"].rpartition(".")
            function = getattr(names[kind](), method) if kind else names[method]
            answer({"value": encode(function(*map(decode, call["args"])))})
        except BaseException as error:
            answer({"error": f"{type(error).__name__}: {error}"[:300]})


class NumpyFinder:
    """An import finder for `numpy` at a given path, whose parent folder may be unreadable; "": no numpy."""

    def __init__(self, package: str):
        self.package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "numpy" or not self.package:
            return None
        os.environ["OPENBLAS_NUM_THREADS"] = "1"  # each takes address space
        file = os.path.join(self.package, "__init__.py")
        return importlib.util.spec_from_file_location(name, file, submodule_search_locations=[self.package])


MADE_BY = {"Counter", "defaultdict", "deque", "dict", "float", "frozenset", "list", "lru_cache", "namedtuple", "set"}


def define(text: str, names: dict) -> None:
    """Executes a source text's imports, functions, classes, and assignments that call only functions of `MADE_BY`."""
    import ast

    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            calls = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
            called = {getattr(func, "id", getattr(func, "attr", "")) for func in calls}
            if not called <= MADE_BY and not isinstance(node.value, ast.Lambda):
                continue
        elif not isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        try:
            exec(compile(ast.Module([node], []), "beside", "exec"), names)
        except Exception:
            continue


# ---- plain data --------------------------------------------------------------------------------------------------

CONTAINERS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: object, depth: int = 0) -> object:
    """Encodes plain data as JSON. Raises TypeError for other types: a subclass could fake equality."""
    if depth > MAX_DEPTH:
        raise TypeError("nested too deep")
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return {"int": hex(value)}  # type: ignore[arg-type]
    if kind is float:
        return {"float": float.hex(value)}  # type: ignore[arg-type]
    if kind is complex:
        return {"complex": [float.hex(value.real), float.hex(value.imag)]}  # type: ignore[attr-defined]
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}  # type: ignore[arg-type]
    for name, container in CONTAINERS.items():
        if kind is container:
            return {name: [encode(x, depth + 1) for x in value]}  # type: ignore[attr-defined]
    if kind is dict:
        pairs = value.items()  # type: ignore[attr-defined]
        return {"dict": [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in pairs]}
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):  # a scalar or an array
        return encode(value.tolist(), depth + 1)
    raise TypeError(f"not plain data: {kind.__name__}")


def decode(value: object) -> object:
    """Decodes a value of `encode`. Raises ValueError for any other value."""
    if value is None or isinstance(value, bool | str):
        return value
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError("not plain data")
    ((kind, inner),) = value.items()
    if kind == "int":
        return int(inner, 16)
    if kind == "float":
        return float.fromhex(inner)
    if kind == "complex":
        return complex(*map(float.fromhex, inner))
    if kind == "bytes":
        return base64.b64decode(inner)
    if kind in CONTAINERS:
        return CONTAINERS[kind](map(decode, inner))
    if kind == "dict":
        return {decode(k): decode(v) for k, v in inner}
    raise ValueError("not plain data")


# ---- the grading process -----------------------------------------------------------------------------------------


class FailedError(Exception):
    """The program failed its task; the message says how."""


class Program:
    """A program that runs in a process of its own. A wait beyond the deadline raises `FailedError`."""

    def __init__(
        self,
        program: str,
        deadline: float,
        memory_mb: int,
        *,
        beside: Sequence[str] = (),
        stdin: str | None = None,
        tell: bool = False,
    ):
        """`beside`: source texts whose definitions the program may use. `tell`: with `stdin`, an exception in the
        program is printed and is no failure."""
        self.deadline = deadline
        self.buffer = b""
        self.read = 0
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
        )
        cpu_s = max(1, round(deadline - time.monotonic()) + 1)
        task = {"program": program, "beside": list(beside), "memory_mb": memory_mb, "cpu_s": cpu_s, "tell": tell}
        task["numpy"] = numpy()
        self._send(task if stdin is None else task | {"stdin": stdin})

    def call(self, name: str, args: list) -> object:
        """Calls a function of the program and returns its value, as plain data."""
        self._send({"name": name, "args": [encode(x) for x in args]})
        return self.answer()

    def answer(self) -> object:
        """Returns the next answer. Raises FailedError for an error in the program, a timeout, or a malformed answer."""
        while b"\n" not in self.buffer:
            self._fill()
        line, self.buffer = self.buffer.split(b"\n", 1)
        try:
            said = json.loads(line)
            if "error" in said:
                raise FailedError(str(said["error"]))
            return decode(said["value"])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise FailedError(f"not an answer: {error}") from None

    def output(self) -> str:
        """Returns all that the program prints until it ends. Raises FailedError unless its exit code is 0."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            while True:
                self._fill()
        except EOFError:
            pass
        try:
            code = self.process.wait(max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise FailedError("it does not end") from None
        if code:
            raise FailedError(f"ended with code {code}")
        return self.buffer.decode(errors="replace")

    def _send(self, value: dict) -> None:
        assert self.process.stdin is not None
        data = json.dumps(value).encode() + b"\n"
        handle = self.process.stdin.fileno()
        os.set_blocking(handle, False)
        while data:
            if not select.select([], [handle], [], max(0.0, self.deadline - time.monotonic()))[1]:
                raise FailedError("out of time")
            try:
                data = data[os.write(handle, data) :]
            except OSError:
                raise FailedError("it ended before its time") from None

    def _fill(self) -> None:
        assert self.process.stdout is not None
        handle = self.process.stdout.fileno()
        if not select.select([handle], [], [], max(0.0, self.deadline - time.monotonic()))[0]:
            raise FailedError("out of time")
        chunk = os.read(handle, 65_536)
        if not chunk:
            raise EndedError("it ended before its time")
        self.read += len(chunk)
        if self.read > MAX_ANSWER:
            raise FailedError("too much output")
        self.buffer += chunk

    def stop(self) -> None:
        """Kills the process and closes its pipes."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@functools.cache
def numpy() -> str:
    """Returns the path of the package numpy; "" if this process cannot import numpy."""
    spec = importlib.util.find_spec("numpy")
    return "" if spec is None or spec.origin is None else os.path.dirname(spec.origin)


class EndedError(FailedError, EOFError):
    """The program's process has ended."""


def prepare(memory_mb: int) -> None:
    """Makes this process ready to run programs, and tries two. Raises OSError: no program can be run safely here."""
    _libc().prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: nothing of this process is read, even without Landlock
    trial = {"program": "def f(): return 1", "test": "def check(f): assert f() == 1", "entry_point": "f"}
    if not passes(trial, 60.0, memory_mb):
        raise OSError(NEEDS)
    reads = f"def f(): open('/proc/{os.getppid()}/environ').read(1)"
    if passes(trial | {"program": reads, "test": "def check(f): f()"}, 60.0, memory_mb):
        raise OSError(
            "no program is run: it could read the trainer's environment and memory; install bubblewrap"
            " (apt install bubblewrap), or take a kernel with Landlock (5.13 or later)"
        )


def passes(task: dict, timeout_s: float, memory_mb: int) -> bool:
    """Tells whether a program passes its tests.

    task: {"program", "beside": optional, see `Program`, and one of
           "test": text that defines check(candidate), "entry_point": name, "preamble": text that it may need;
           "inputs", "outputs": texts for standard input, and what it must print (compared word by word);
           "inputs", "outputs", "function": JSON argument lists, one argument a line, and the JSON value of a call}
    """
    deadline = time.monotonic() + timeout_s
    try:
        if "test" in task:
            return _check_holds(task, deadline, memory_mb)
        for given, expected in zip(task["inputs"], task["outputs"], strict=True):
            own_input = None if task.get("function") else given
            beside = task.get("beside", ())
            program = Program(task["program"], deadline, memory_mb, beside=beside, stdin=own_input)
            try:
                if task.get("function"):
                    program.answer()
                    found = program.call(task["function"], [json.loads(line) for line in given.splitlines()])
                    if _lists(found) != json.loads(expected):
                        return False
                elif program.output().split() != expected.split():
                    return False
            finally:
                program.stop()
        return bool(task["inputs"])
    except FailedError:
        return False


def _check_holds(task: dict, deadline: float, memory_mb: int) -> bool:
    """Tells whether check(candidate) ends without an error; it runs here, and `candidate` in the program's process."""
    names: dict = {"__name__": "check"}
    exec(compile(task.get("preamble", ""), "preamble", "exec"), names)
    exec(compile(task["test"], "test", "exec"), names)
    program = Program(task["program"], deadline, memory_mb, beside=task.get("beside", ()))

    def candidate(*args: object) -> object:
        return program.call(task["entry_point"], list(args))

    names[task["entry_point"]] = candidate  # some tests call it by its name
    try:
        program.answer()
        try:
            names["check"](candidate)
        except Exception:  # an assertion, or a comparison that cannot be made
            return False
        return True
    finally:
        program.stop()


def _lists(value: object) -> object:
    """JSON has no tuples."""
    return [_lists(x) for x in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    child()
