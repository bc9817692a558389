"""A process of a part: ``python -m benchmarks.prove.worker PART RUN``, RUN being the fields of a Run as JSON. Each record is a line of JSON.

It prepares what its part needs, and begins once a line of stdin says when it is to end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from dataclasses import replace
from typing import Any, NoReturn

from benchmarks.prove.part import Run
from benchmarks.prove.schedule import PARTS


def main() -> None:
    """Write the records, and at the end one that says so. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, _end)
    (part,) = (part for part in PARTS if part.name == sys.argv[1])
    run = Run(**json.loads(sys.argv[2]))
    try:
        getattr(part.module, "prepare", lambda run: None)(run)
    except Exception:  # which comes again where it is looked for
        traceback.print_exc()
    run = replace(run, until=float(sys.stdin.readline()))
    for record in part.module.work(run):
        print(json.dumps(record), file=answers, flush=True)
        if record.get("fatal"):  # whoever started this starts another for the rest
            raise SystemExit(3)
    print(json.dumps({"end": True}), file=answers, flush=True)


def _end(*_: Any) -> NoReturn:
    """Leave as after an exception, so that processes which were started here are ended."""
    raise SystemExit(1)


if __name__ == "__main__":
    main()
