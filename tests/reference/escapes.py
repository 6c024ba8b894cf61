# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Attempts of a program against the trainer, its user and its kernel. Each attempt is a few lines of Python.

They see `victim`, the number of a process of the same user, `file`, a file of the user's, and `call`, a system call by
its number. Nothing here does harm where it succeeds: the signal is SIGCONT, and what is written goes beside `file`.
"""

import json

# What any process of the user may do: a test makes these attempts outside the jail, where they succeed.
HIDDEN = {
    "proc: environment of another": "open(f'/proc/{victim}/environ').read(1)",
    "proc: memory of another": "open(f'/proc/{victim}/mem', 'rb')",
    "proc: maps of another": "open(f'/proc/{victim}/maps').read(1)",
    "proc: descriptors of another": "os.open(f'/proc/{victim}/fd/0', os.O_RDONLY)",
    "proc: root of another": "os.open(f'/proc/{victim}/root/etc/passwd', os.O_RDONLY)",
    "proc: command line of another": "open(f'/proc/{victim}/cmdline').read(1)",
    "proc: the list of processes": "os.listdir('/proc')",
    "proc: its own": "open('/proc/self/status').read(1)",
    "file: read": "open(file).read(1)",
    "file: read the users": "open('/etc/passwd').read(1)",
    "file: list": "os.listdir(os.path.dirname(file))",
}  # fmt: skip
ORDINARY = {
    "signal: kill": "os.kill(victim, 18)",
    "signal: tkill": "call(200, victim, 18)",
    "signal: tgkill": "call(234, victim, victim, 18)",
    "signal: rt_sigqueueinfo": "call(129, victim, 18, struct.pack('iiiiii', 18, 0, -1, 0, 0, 0) + bytes(104))",
    "signal: pidfd": "signal.pidfd_send_signal(os.pidfd_open(victim), 18)",
    "signal: F_SETOWN": "fcntl.fcntl(pipe, 8, victim); asynchronous(pipe)",
    "signal: F_SETOWN_EX": "fcntl.fcntl(pipe, 15, struct.pack('ii', 1, victim)); asynchronous(pipe)",
    "signal: F_SETSIG": "fcntl.fcntl(pipe, 10, 18)",
    "signal: O_ASYNC": "fcntl.fcntl(pipe, 4, fcntl.fcntl(pipe, 3) | os.O_ASYNC)",
    "signal: FIOASYNC": "fcntl.ioctl(pipe, 0x5452, struct.pack('i', 0))",
    "process: fork": "os.fork() or os._exit(0)",
    "process: vfork and exec": "os.posix_spawn('/bin/true', ['true'], {})",
    "process: subprocess": "__import__('subprocess').run(['true'])",
    "process: a child in a session of its own": "__import__('subprocess').Popen(['true'], start_new_session=True)",
    "process: setsid": "os.fork() or (os.setsid(), os._exit(0))",
    "process: memfd and exec": "os.posix_spawn(f'/proc/self/fd/{memory()}', ['x'], {})",
    "process: priority of another": "os.setpriority(0, victim, os.getpriority(0, victim))",
    "process: limits of another": "call(302, victim, 7, None, ctypes.create_string_buffer(16))",
    "process: processors of another": "os.sched_setaffinity(victim, os.sched_getaffinity(0))",
    "memory: process_vm_readv": "call(310, victim, None, ctypes.c_long(0), None, ctypes.c_long(0), ctypes.c_long(0))",
    "memory: memfd": "os.memfd_create('x')",
    "memory: POSIX": "os.open(shared, os.O_RDWR | os.O_CREAT); os.remove(shared)",
    "memory: System V": "call(31, call(29, 0, ctypes.c_long(4096), 0o600), 0, None)",
    "socket: TCP": "socket.socket()",
    "socket: UDP": "socket.socket(type=socket.SOCK_DGRAM)",
    "socket: Unix": "socket.socket(socket.AF_UNIX)",
    "socket: abstract": "socket.socket(socket.AF_UNIX).bind(f'\\0qarl-{os.getpid()}')",
    "socket: netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "socket: a pair": "socket.socketpair()",
    "file: write": "open(file, 'a')",
    "file: create": "open(file + '.new', 'w')",
    "file: create by a temporary name": "os.open(os.path.dirname(file), os.O_RDWR | os.O_TMPFILE)",
    "file: truncate": "os.truncate(file, 5)",
    "file: rename": "os.rename(file, file)",
    "file: link": "os.link(file, file + '.link'); os.remove(file + '.link')",
    "file: symlink": "os.symlink(file, file + '.sym'); os.remove(file + '.sym')",
    "file: mode": "os.chmod(file, 0o600)",
    "file: times": "os.utime(file)",
    "file: owner": "os.chown(file, -1, -1)",
    "file: folder": "os.mkdir(file + '.dir'); os.rmdir(file + '.dir')",
    "file: change the folder": "os.chdir(os.path.dirname(file))",
    "limits: raised": "__import__('resource').setrlimit(9, __import__('resource').getrlimit(9))",
    "limits: its name": "call(157, 15, b'other', 0, 0, 0)",
}  # fmt: skip
# What takes a privilege, or a kernel that has it.
PRIVILEGED = {
    "kernel: io_uring": "call(425, 1, ctypes.create_string_buffer(120))",
    "kernel: userfaultfd": "call(323, 1)",
    "kernel: ptrace": "call(101, 16, victim, None, None)",
    "kernel: process_vm_writev": "call(311, victim, None, ctypes.c_long(0), None, ctypes.c_long(0), ctypes.c_long(0))",
    "kernel: pidfd_getfd": "call(438, os.pidfd_open(victim), 0, 0)",
    "kernel: kcmp": "call(312, os.getpid(), victim, 1, 0, 0)",
    "kernel: add_key": "call(248, b'user', b'qarl', b'x', ctypes.c_long(1), -3)",
    "kernel: request_key": "call(249, b'user', b'qarl', None, -3)",
    "kernel: keyctl": "call(250, 0, -3, 0)",
    "kernel: bpf": "call(321, 0, bytes(72), 72)",
    "kernel: perf_event_open": "call(298, bytes(120), 0, -1, -1, 0)",
    "kernel: mount": "call(165, b'none', b'/tmp', b'tmpfs', 0, None)",
    "kernel: unshare": "call(272, 0x10000000)",
    "kernel: setns": "call(308, 0, 0)",
    "kernel: chroot": "os.chroot('/')",
    "kernel: pivot_root": "call(155, b'.', b'.')",
    "kernel: open_by_handle_at": "call(304, -100, bytes(32), 0)",
    "kernel: another filter": "call(317, 1, 8, None)",
    "kernel: personality": "call(135, 0)",
    "kernel: x32": "call(0x40000000 | 39)",
    "kernel: another user": "os.setuid(os.getuid())",
    "kernel: messages": "call(103, 3, ctypes.create_string_buffer(16), 16)",
    "kernel: a module": "call(175, None, 0, b'')",
    "kernel: a tracer of its own": "call(101, 0, 0, None, None)",
    "kernel: openat2": "call(437, -100, b'/', bytes(24), ctypes.c_long(24))",
    "file: attribute": "os.setxattr(file, 'user.x', b'x')",
    "signal: F_SETLEASE": "fcntl.fcntl(pipe, 1024, 0)",
    "signal: F_NOTIFY": "fcntl.fcntl(pipe, 1026, 4)",
    "terminal: TIOCSTI": "fcntl.ioctl(0, 0x5412, b'x')",
}  # fmt: skip
# The refusals under the whole jail, and under the filter alone.
REFUSALS = dict.fromkeys(HIDDEN, ("ENOENT", "EACCES")) | dict.fromkeys(ORDINARY | PRIVILEGED, ("EPERM", "EPERM"))
ALL = HIDDEN | ORDINARY | PRIVILEGED

_PRELUDE = """
import ctypes, errno, fcntl, json, os, signal, socket, struct, sys

def call(number, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    found = libc.syscall(number, *arguments)
    if found < 0:
        raise OSError(ctypes.get_errno(), 'refused')
    return found

def asynchronous(pipe):
    fcntl.fcntl(pipe, 10, 18)
    fcntl.fcntl(pipe, 4, fcntl.fcntl(pipe, 3) | os.O_ASYNC)

def memory():
    handle = os.memfd_create('x', 0)
    os.write(handle, b'#!/bin/true\\n')
    return handle

pipe, _ = os.pipe()
"""


def program(attempts: dict[str, str], victim: int, file: str) -> str:
    """A program that makes every attempt and prints {name: "done" or the name of the error that refused it}."""
    return f"""{_PRELUDE}
victim, file, shared, said = {victim}, {file!r}, '/dev/shm/qarl-escape', {{}}
for name, attempt in json.loads({json.dumps(attempts)!r}).items():
    try:
        exec(attempt)
        said[name] = 'done'
    except OSError as error:
        said[name] = errno.errorcode.get(error.errno, str(error))
    except Exception as error:
        said[name] = repr(error)
print(json.dumps(said))
"""
