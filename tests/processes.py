"""Processes of one group that wait for work: starting them takes seconds, so that they are started once for all tests."""

from __future__ import annotations

import gc
import io
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed

from dmattn.execution.backend import interpreting

TIMEOUT = 60  # seconds, of the group
COMPILING = 180  # likewise, where a rank may compile kernels that another has already


def collect_rarely() -> None:
    """Let the garbage collector pass over all objects that are there, and look at older ones, such as what tests import and compile, rarely.

    It took a seventh of the time of a model's tests, and a fifth of that of their ranks. Not where there is a GPU: tensors in garbage hold its memory.
    """
    gc.freeze()
    gc.set_threshold(10_000, 10, 100)


@dataclass
class Failure:
    """What a rank raised."""

    error: Exception
    trace: str


class Processes:
    """`size` processes with gloo on the CPU, or with NCCL on a GPU each."""

    def __init__(self, size: int, kind: str = "cpu") -> None:
        self.size, self.kind = size, kind
        self._folder = tempfile.TemporaryDirectory()
        context = get_context("forkserver")  # which imports once for all that it starts
        imported = ["dmattn.distributed", "dmattn.equivalence", "pytest"]
        context.set_forkserver_preload(imported if interpreting() else [*imported, "torch._dynamo"])
        ends = [context.Pipe() for _ in range(size)]
        self._connections = [ours for ours, _ in ends]
        arguments = (size, kind, f"file://{self._folder.name}/meeting")
        self._processes = [
            context.Process(target=_serve, args=(rank, theirs, *arguments), daemon=True) for rank, (_, theirs) in enumerate(ends)
        ]
        for process in self._processes:
            process.start()

    @property
    def is_whole(self) -> bool:
        """Whether no process has ended, as NCCL ends one that waited in vain."""
        return all(process.is_alive() for process in self._processes)

    def outcomes(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `function(rank, *arguments)` returns or, as a :class:`Failure`, raises on each rank."""
        for connection in self._connections:
            connection.send_bytes(_bytes((function, arguments)))
        return [_value(connection.recv_bytes()) for connection in self._connections]

    def results(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What it returns on each rank, where none raises."""
        outcomes = self.outcomes(function, *arguments)
        for rank, outcome in enumerate(outcomes):
            assert not isinstance(outcome, Failure), f"rank {rank}: {outcome.trace}"
        return outcomes

    def errors(self, function: Callable[..., Any], *arguments: Any) -> list[Exception]:
        """What it raises on each rank, where all raise."""
        outcomes = self.outcomes(function, *arguments)
        assert all(isinstance(outcome, Failure) for outcome in outcomes), outcomes
        return [outcome.error for outcome in outcomes]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()  # which ends the process
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


def _serve(rank: int, connection: Connection, size: int, kind: str, meeting: str) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    if kind == "cuda":
        torch.cuda.set_device(rank)
    else:
        collect_rarely()
    limit = timedelta(seconds=COMPILING if kind == "cuda" else TIMEOUT)
    distributed.init_process_group("nccl" if kind == "cuda" else "gloo", init_method=meeting, rank=rank, world_size=size, timeout=limit)
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            os._exit(0)  # without waiting for others, which may wait for this one
        outcome: Any
        try:
            function, arguments = _value(request)
            outcome = function(rank, *arguments)
        except Exception as error:
            outcome = Failure(error, traceback.format_exc())
        connection.send_bytes(_bytes(outcome))


def _bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=pickle)
    return buffer.getvalue()


def _value(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False, map_location="cpu")
