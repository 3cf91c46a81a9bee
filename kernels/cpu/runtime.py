"""How numba runs here: where compiled code is kept, how many threads work, who may enter at once.

Owns every numba setting of the project. The kernels themselves know only the `compiled` decorator.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import torch
from numba.core import config

logger = logging.getLogger(__name__)
numba_config: Any = config

parallel_section = threading.Lock()
"""Held around every call that forks threads. One of numba's threading layers ("workqueue", the one that is
always there) aborts the process when two threads enter at once; with the others the calls would only take each
other's cores, so there is nothing to win by telling them apart."""


def cache_root() -> Path:
    """`$OCTAVO_CACHE`, else `$XDG_CACHE_HOME/octavo`, else `~/.cache/octavo`; may not exist yet."""
    own = os.environ.get("OCTAVO_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "octavo"


@functools.lru_cache(maxsize=1)
def code_cache_dir() -> Path | None:
    """Folder of the compiled kernels, created; None when it cannot be written, and then nothing is kept.

    numba notices a changed function, not a changed callee, so the folder is named after the text of all of
    this package's files. It holds pickles: it must be the user's own, hence no fall-back to a shared one.
    """
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    try:
        folder = cache_root() / "numba" / digest.hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        logger.warning("compiled CPU kernels are not kept between starts (set OCTAVO_CACHE): %s", error)
        return None
    return folder


def compiled(*, parallel: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`numba.njit` without the GIL and kept on disk in `code_cache_dir`, wherever the package is installed.

    No global fast-math: the kernels mark the few operations that may be fused, and masking needs infinities.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        folder = code_cache_dir()
        # numba takes the folder from a global while the decorator runs; others in the process keep theirs.
        previous = numba_config.CACHE_DIR
        if folder is not None:
            numba_config.CACHE_DIR = str(folder)
        try:
            kernel: Callable[..., Any] = numba.njit(
                function, cache=folder is not None, nogil=True, parallel=parallel, error_model="numpy"
            )
        finally:
            numba_config.CACHE_DIR = previous
        return kernel

    return decorate


def thread_count() -> int:
    """Threads that a parallel kernel called now will use: torch's setting, within numba's pool.

    torch's number is the process's one truth (`torch.set_num_threads`); numba's own is per thread, so it is
    brought in line here, in the thread that calls.
    """
    count: int = max(1, min(torch.get_num_threads(), numba_config.NUMBA_NUM_THREADS))
    if numba.get_num_threads() != count:
        numba.set_num_threads(count)
    return count
