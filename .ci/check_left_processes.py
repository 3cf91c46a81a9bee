"""Fails, and says which, when a process of this CI run is still alive: a test has not cleaned up."""

import os
import sys

import psutil

MARK = "OCTAVO_CI_RUN"
PATIENCE_SECONDS = 10
"""Processes that were told to end get this long to do so."""


def left() -> list[psutil.Process]:
    """Processes with this run's mark in their environment, other than this one and those that wait for it."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    return [process for process in psutil.process_iter() if process.pid not in own and _marked(process)]


def _marked(process: psutil.Process) -> bool:
    try:
        return process.environ().get(MARK) == os.environ[MARK]
    except psutil.Error:  # gone meanwhile, a zombie, or somebody else's
        return False


def main() -> int:
    _, alive = psutil.wait_procs(left(), timeout=PATIENCE_SECONDS)
    for process in alive:
        print(f"left running by the tests: {process.pid} {' '.join(process.cmdline())}", file=sys.stderr)
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
