"""An environment of its own for each peer, made on first use.

A peer's script calls `enter` before it imports the peer: outside its environment this makes it (in the cache folder
`peers`; gigabytes for some) and starts the script again in it. Nothing is installed into Octavo's own environment.
Sources that do not answer are left out, so that a machine which reaches nothing but a package index gets what that
index has.
"""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
import venv
from collections.abc import Sequence
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
"""For the peers that run on it: Octavo's own version, and not a newer one that would come with gigabytes."""
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_SECONDS_MAX = 10.0
HUGGING_FACE = ("hugging-face", ("transformers==5.24.0", "psutil", TORCH))
"""For `enter`: the environment of both ways in which transformers itself serves a batch."""


def reachable(url: str) -> bool:
    """Whether something answers there, within `PROBE_SECONDS_MAX`."""
    request = urllib.request.Request(url, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=PROBE_SECONDS_MAX):
            return True
    except (urllib.error.URLError, TimeoutError):
        return False


def enter(
    name: str, requirements: Sequence[str], *, unwanted: Sequence[str] = (), preload: Sequence[str] = ()
) -> None:
    """Return inside the peer's environment; elsewhere, replace this process by the same command in there.

    `unwanted` packages are removed once all are installed. `preload` names libraries that the dynamic linker loads
    first, by file name in the environment's lib folder or as the system knows them; what is not there is left out.
    """
    sys.path.insert(0, str(BENCHMARKS))
    root = _peers_root() / name
    if Path(sys.prefix) == root:
        return
    python = root / "bin" / "python"
    done = root / ".installed"
    if not done.exists():
        shutil.rmtree(root, ignore_errors=True)  # of an installation that was broken off
        _install(root, python, requirements, unwanted)
        done.touch()
    libraries = [found for library in preload if (found := _find_library(root, library))]
    if libraries:
        os.environ["LD_PRELOAD"] = ":".join(libraries)
    os.execv(python, [str(python), *sys.argv])


def _peers_root() -> Path:
    """`peers` in Octavo's cache folder (`octavo.worker.model_cache`, which no peer's environment can import)."""
    own, shared = os.environ.get("OCTAVO_CACHE"), os.environ.get("XDG_CACHE_HOME")
    cache = Path(own) if own else (Path(shared) if shared else Path.home() / ".cache") / "octavo"
    return cache.expanduser().absolute() / "peers"


def _install(root: Path, python: Path, requirements: Sequence[str], unwanted: Sequence[str]) -> None:
    print(f"installing {', '.join(requirements)} into {root} (once) ...", file=sys.stderr, flush=True)
    venv.create(root, with_pip=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    index = ["--extra-index-url", TORCH_CPU_INDEX] if reachable(TORCH_CPU_INDEX) else []
    # Standard output is the figures'.
    subprocess.run([*pip, "install", *index, *requirements], check=True, stdout=sys.stderr)
    if unwanted:
        subprocess.run([*pip, "uninstall", "--yes", *unwanted], check=True, stdout=sys.stderr)


def _find_library(root: Path, library: str) -> str | None:
    own = root / "lib" / library
    return str(own) if own.exists() else ctypes.util.find_library(library.removeprefix("lib").split(".so")[0])
