"""Processes that have imported PyTorch when they start: forks of one that did nothing else.

Half the CPU time of a test that captures a step in a child process was that of the child's imports.
A fork has their modules, the environment and `sys.path` of now, and no state of other tests.
"""

import json
import os
import socket
import subprocess
import sys
import traceback
from functools import cache
from pathlib import Path

IMPORTED = (
    "coop_plan.runtime.capture.joint_graph",
    "coop_plan.runtime.offline_capture.eager_memory",
    "coop_plan.runtime.offline_capture.fake_device",
    "coop_plan.runtime.offline_capture.meta_kernels",
    "coop_plan.runtime.offline_capture.target",
)
PROGRAM = f"""
import ctypes, importlib, sys
for library in sys.argv[2:]:
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
for module in {IMPORTED}:
    importlib.import_module(module)
from tests.runtime.forked import serve
serve(int(sys.argv[1]))
"""


class Forked:
    """A process with the pipes of a `Popen`; `program` is Python, run as a module's main."""

    def __init__(self, program, *arguments, libraries=(), stderr=2):
        asked = {
            "program": program,
            "arguments": arguments,
            "environment": dict(os.environ),
            "path": [str(Path(folder).resolve()) for folder in sys.path],
            "folder": str(Path.cwd()),
        }
        given, stdin = os.pipe()
        stdout, made = os.pipe()
        code, ended = os.pipe()
        files = [given, made, stderr, ended]
        door, _ = server(tuple(str(Path(library).resolve()) for library in libraries))
        socket.send_fds(door, [json.dumps(asked).encode()], files)
        for file in (given, made, ended):
            os.close(file)
        self.stdin, self.stdout, self._code = (
            os.fdopen(file, mode) for file, mode in ((stdin, "wb"), (stdout, "rb"), (code, "rb"))
        )

    def communicate(self):
        """What it printed, after the end of its input."""
        self.stdin.close()
        with self.stdout:
            return self.stdout.read(), self.wait()

    def wait(self):
        """Its exit code, negative for a signal's."""
        with self._code:
            return int(self._code.read())


@cache
def server(libraries):
    """A process that loaded `libraries` before PyTorch, and its door; it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = os.pathsep.join(str(Path(folder).resolve()) for folder in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(theirs.fileno()), *libraries],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    return ours, process


def serve(door):
    """Fork for each request: a line of JSON, with stdin, stdout, stderr and a pipe for the code."""
    door = socket.socket(fileno=door)
    while True:
        data, files, _, _ = socket.recv_fds(door, 1 << 20, 4)
        if not data:
            os._exit(0)
        if os.fork() == 0:
            child(json.loads(data), *files)
        for file in files:
            os.close(file)
        os.wait()  # for the first fork, which ends at once


def child(asked, stdin, stdout, stderr, code):
    """The child waits for the grandchild, which is not the server's to wait for."""
    if os.fork():
        os._exit(0)
    forked = os.fork()
    if forked:
        status = os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])
        os.write(code, str(status).encode())
        os._exit(0)
    for number, file in enumerate((stdin, stdout, stderr)):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.path[:], sys.argv[1:] = asked["path"], asked["arguments"]
    os.chdir(asked["folder"])
    status = 1
    try:
        exec(compile(asked["program"], "program", "exec"), {"__name__": "__main__"})
        sys.stdout.flush()
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(status)
