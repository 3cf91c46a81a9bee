"""Where downloaded and converted models lie, and how a folder is made there exactly once.

Owns the cache root and the rule for publishing into it: build in a temporary folder beside the target, under a
file lock, then rename. A reader therefore sees a whole folder or none, and of two workers that start together one
builds and the other waits. Knows nothing of what is built; imports neither torch nor transformers.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from octavo.protos.errors import ModelLoadError

LOCK_TIMEOUT_SECONDS = 1800.0
"""Longest wait for another process that builds the same folder (a large GGUF takes minutes to convert)."""


def cache_root() -> Path:
    """`$OCTAVO_CACHE`, else `$XDG_CACHE_HOME/octavo`, else `~/.cache/octavo`. Need not exist yet."""
    own = os.environ.get("OCTAVO_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser().absolute() if shared else Path.home() / ".cache") / "octavo"


def models_root() -> Path:
    """The folder of converted models inside the cache."""
    return cache_root() / "models"


def report(message: str) -> None:
    """One progress line on standard error; standard output belongs to whoever called us."""
    print(f"octavo: {message}", file=sys.stderr, flush=True)


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Make the folder `target` by calling `build(temporary_folder)`, unless it is already there; return it.

    `build` fills an empty folder on the same file system and raises on failure, in which case nothing is left
    behind. Raises `ModelLoadError` when the cache cannot be written or another process holds the lock for too long.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock", timeout=LOCK_TIMEOUT_SECONDS):
            if target.is_dir():
                return target
            for stale in target.parent.glob(
                f".{target.name}.*"
            ):  # of a builder that was killed: we hold the lock
                shutil.rmtree(stale, ignore_errors=True)
            partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
            try:
                build(partial)
                partial.chmod(0o755)  # mkdtemp makes it private, and a cache may be shared
                partial.rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except Timeout:
        raise ModelLoadError(
            f"waited {LOCK_TIMEOUT_SECONDS:.0f} s for another process to finish {target}; "
            f"if none is at work, delete {target}.lock"
        ) from None
    except OSError as error:
        raise ModelLoadError(
            f"cannot write the model cache at {target}: {error}; set OCTAVO_CACHE"
        ) from error
    return target
