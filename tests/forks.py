"""Code that wants a process of its own: each piece gets one, forked from a process that has imported what takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FORKS = """
import json, os, sys, tempfile, traceback

first, *codes = json.loads(sys.argv[1])
exec(first)
ended = []
for code in codes:
    files = [tempfile.TemporaryFile("w+") for _ in range(2)]
    process = os.fork()
    if not process:
        for number, file in enumerate(files, 1):
            os.dup2(file.fileno(), number)
        status = 1
        try:
            exec(code, {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    for file in files:
        file.seek(0)
    ended.append([status, *(file.read() for file in files)])
print(json.dumps(ended))
"""


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def in_processes(codes: Sequence[str], first: str = "import torch") -> list[Ended]:
    """How the process of each code ended, all of which have run `first`: with 1 after any exception, SystemExit too, and without atexit's calls."""
    command = [sys.executable, "-c", FORKS, json.dumps([first, *codes])]
    run = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [Ended(*each) for each in json.loads(run.stdout.splitlines()[-1])]
