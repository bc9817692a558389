"""Processes that are forked from one that has imported what they need: importing takes each of them seconds, and more beside others that do it.

That one, the server, is a Python of its own for each environment: where PYTHONPATH names another version of the package, that is imported. It
never calls CUDA, since a process that has cannot be forked into one that does. It forks when it is asked to, and tells how a process ended. It
ends with the process that has started it, and then ends all that it has forked.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
IMPORT_SECONDS, END_SECONDS = 120.0, 10.0  # at most, of the server
PRELOADED = (  # what rows import, but for peers that load the driver or may end a process, as cudnn and flash_attn do
    "benchmarks.contenders",
    "benchmarks.harness",
    "benchmarks.matrix_rows",
    "benchmarks.row_check",
    "dmattn.bench.compare",
    "dmattn.kernels",
    "torch._inductor.codegen.cuda_combined_scheduling",  # this and the rest when FlexAttention is compiled
    "torch._inductor.compile_fx",
    "torch._inductor.cudagraph_trees",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
)
WITHOUT_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # how PyTorch answers modules that ask, as they are imported, whether there is a GPU
VERSIONS = 2  # of the package, which are measured beside each other


class Ended(RuntimeError):
    """The process that forks others does not answer any more, or cannot fork."""


class Forked:
    """A process that serves what `made` names, as "module:name", with the given arguments. Its methods are those of ``subprocess.Popen``."""

    def __init__(self, made: str, given: Any, environment: dict[str, str], stderr: int) -> None:
        with _starting:
            self._server = _server(environment)
        reading, requests = os.pipe()
        answers, writing = os.pipe()
        self.stdin, self.stdout = os.fdopen(requests, "wb", 0), os.fdopen(answers, "rb", 0)
        try:
            self.pid = self._server.ask([made, given], (reading, writing, stderr))
        except Ended:
            self.stdin.close()
            self.stdout.close()
            raise
        finally:
            os.close(reading)
            os.close(writing)
        self.returncode: int | None = None
        self.is_left_alone = False  # by its server, which has ended

    def poll(self) -> int | None:
        """The exit code, negative after a signal; None while it runs. One that is asked for after the end of its server is ended."""
        if self.returncode is None:
            try:
                self.returncode = self._server.ask(self.pid)
            except Ended:
                self.is_left_alone = True
                with contextlib.suppress(OSError):
                    os.kill(self.pid, signal.SIGKILL)
                self.returncode = -signal.SIGKILL
        return self.returncode

    def wait(self) -> int:
        """The exit code, once there is one."""
        while self.poll() is None:
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """End it. Nothing else has its number, as long as there is its server, which keeps it until it was told how the process ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class _Server:
    def __init__(self, environment: dict[str, str]) -> None:
        self._one_at_a_time = Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(IMPORT_SECONDS)
        with theirs:  # libraries may print while they are imported
            command = [sys.executable, "-m", "benchmarks.forked"]
            process = subprocess.Popen(command, stdin=theirs, stdout=2, env=environment | WITHOUT_CUDA, cwd=ROOT)
        weakref.finalize(self, _end, self._channel, process)

    @property
    def has_ended(self) -> bool:
        """Whether it has once given no answer, so that the next would be that to another request."""
        return self._channel.fileno() < 0

    def ask(self, request: Any, files: Sequence[int] = ()) -> Any:
        """Its answer: of [made, given], with the files for standard input, output and error, the process; of a process, the exit code."""
        with self._one_at_a_time:
            answer = b""
            try:
                socket.send_fds(self._channel, [json.dumps(request).encode()], files)
                answer = self._channel.recv(1 << 10)
            except OSError as error:  # a time out is one, too
                raise Ended(f"the process that forks others gives no answer: {error}") from None
            finally:
                if not answer:
                    self._channel.close()
            if not answer:
                raise Ended("the process that forks others has ended")
        said = json.loads(answer)
        if isinstance(said, str):
            raise Ended(said)
        return said


def _end(channel: socket.socket, process: subprocess.Popen[bytes]) -> None:
    channel.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:  # it imports, most likely, and has forked nothing
        process.kill()


_starting = Lock()
_servers: dict[str, _Server] = {}  # by environment


def _server(environment: dict[str, str]) -> _Server:
    """That of an environment. Another is started where it has ended."""
    key = json.dumps(environment, sort_keys=True)
    if key in _servers and _servers[key].has_ended:
        del _servers[key]
    if key not in _servers:
        while len(_servers) >= VERSIONS:
            del _servers[next(iter(_servers))]
        _servers[key] = _Server(environment)
    return _servers[key]


def main() -> None:
    """The server: import everything, and fork until nobody asks any more. What is forked serves."""
    for name in PRELOADED:
        with contextlib.suppress(Exception):  # where it is needed, it fails again, and is recorded
            importlib.import_module(name)
    import torch

    assert not torch.cuda.is_initialized()
    sys.stdout.flush()
    gc.collect()
    gc.freeze()  # no collection looks at what was imported, and copies it by that
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends what was forked, and the server is asked how
    asked = _fork_when_asked(socket.socket(fileno=os.dup(0)))
    if asked is not None:
        made, given = asked
        serve(pkgutil.resolve_name(made), given)


def _fork_when_asked(channel: socket.socket) -> Any:
    """What a forked process is to serve; None once there is nobody to ask, and everything forked was ended."""
    running: set[int] = set()
    try:
        while True:
            request, files, *_ = socket.recv_fds(channel, 1 << 16, 3)
            if not request:
                return None
            asked = json.loads(request)
            answer: Any = None
            try:
                if isinstance(asked, int):
                    ended, status = os.waitpid(asked, os.WNOHANG)
                    running.discard(ended)
                    answer = os.waitstatus_to_exitcode(status) if ended else None
                else:
                    answer = os.fork()
            except OSError as error:
                answer = f"{type(error).__name__}: {error}"
            if answer == 0 and not isinstance(asked, int):
                running.clear()  # which are not its own
                channel.close()
                for number, file in enumerate(files):
                    os.dup2(file, number)
                    os.close(file)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                return asked
            if isinstance(answer, int) and not isinstance(asked, int):
                running.add(answer)
            for file in files:
                os.close(file)
            channel.send(json.dumps(answer).encode())
    except ConnectionError:  # nobody waits for the answer
        return None
    finally:
        for process in running:
            os.kill(process, signal.SIGKILL)


def serve(make: Callable[[Any, Callable[[Any], None]], Any], given: dict[str, Any]) -> None:
    """Answer requests until there are no more, each by the method of what is made first. Prints of libraries go to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    made: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            made = made or make({**given}, say)
            answer = getattr(made, request.pop("do"))(**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:240]}
        say(answer)


if __name__ == "__main__":
    main()
