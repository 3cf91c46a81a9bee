"""Looks at this machine with the eyes of a configuration: what would keep `octavo serve` from working, and its remedy.

Owns the checks of `octavo doctor`. Each looks and changes nothing: no process is started, no weight is loaded, nothing
is fetched. What a check cannot know is left to the start itself.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from octavo._version import __version__
from octavo.cluster.service_config import ServiceConfig, split_address
from octavo.protos.errors import OctavoError

GIB = 2**30
PYTHON_MIN = (3, 11)
NEEDED = ("torch", "transformers", "ray", "grpcio", "numba", "numpy", "fastapi", "tokenizers", "safetensors")
SHM_BYTES_MIN = GIB // 2
OPEN_FILES_MIN = 4096
DISK_BYTES_MIN = 2 * GIB
CONNECT_SECONDS = 3.0
OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check saw."""

    name: str
    status: str
    """`ok`; `warn`: it will work, worse than it could; `fail`: it will not work."""
    text: str
    remedy: str = ""

    @property
    def failed(self) -> bool:
        return self.status == FAIL

    def as_dict(self) -> dict[str, str]:
        """JSON-able."""
        return asdict(self)


Findings = Iterator[Finding]


def examine(config: ServiceConfig) -> list[Finding]:
    """All checks, in the order in which a start would meet the trouble. A check that breaks is a finding itself."""
    checks: tuple[tuple[str, Callable[[ServiceConfig], Findings]], ...] = (
        ("versions", _versions),
        ("devices", _devices),
        ("memory", _memory),
        ("limits", _limits),
        ("model", _model),
        ("port", _port),
        ("ray", _ray),
        ("jobs", _jobs),
        ("options", _options),
    )
    found = []
    for name, check in checks:
        try:
            found += list(check(config))
        except Exception as error:
            # Whatever is wrong with this machine, the other checks must still be seen.
            found.append(Finding(name, WARN, f"could not be checked: {type(error).__name__}: {error}"))
    return found


def _versions(config: ServiceConfig) -> Findings:
    python = platform.python_version()
    if sys.version_info < PYTHON_MIN:
        yield Finding("versions", FAIL, f"Python {python}", "use Python 3.11, 3.12 or 3.13")
    versions, missing = [], []
    for package in NEEDED:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        yield Finding(
            "versions", FAIL, f"{', '.join(missing)} not installed", "pip install octavo, or make venv"
        )
    yield Finding("versions", OK, f"octavo {__version__}, Python {python}, {', '.join(versions)}")


def _devices(config: ServiceConfig) -> Findings:
    import torch

    if not torch.cuda.is_available():
        if config.device.startswith("cuda"):
            built = (
                "built without CUDA" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
            )
            remedy = "install a torch build with CUDA, check nvidia-smi, or set device to cpu"
            yield Finding(
                "devices", FAIL, f"device is {config.device}, and torch ({built}) sees no GPU", remedy
            )
        cores = len(os.sched_getaffinity(0))
        yield Finding("devices", OK, f"no GPU; {cores} CPU cores for {config.num_workers} worker(s)")
        if config.num_workers > cores:
            remedy = f"set num_workers to at most {cores}"
            yield Finding("devices", WARN, "more CPU workers than cores: they take turns", remedy)
        return
    count = torch.cuda.device_count()
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        text = f"cuda:{index} {torch.cuda.get_device_name(index)}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        if free < config.gpu_memory_utilization * total * 0.9:
            yield Finding("devices", WARN, text, "end what else uses it, or lower gpu_memory_utilization")
        elif (major, minor) < (8, 0):
            yield Finding(
                "devices", WARN, f"{text}, compute capability {major}.{minor}", "8.0 or later is tested"
            )
        else:
            yield Finding("devices", OK, text)
    if config.ray_address is None and config.device != "cpu" and config.num_workers > count:
        status = FAIL if config.device.startswith("cuda") else WARN
        remedy = f"set num_workers to at most {count}, or join a cluster (ray_address)"
        yield Finding("devices", status, f"{config.num_workers} workers and {count} GPUs", remedy)


def _memory(config: ServiceConfig) -> Findings:
    memory = psutil.virtual_memory()
    text = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
    low = memory.available < 2 * GIB
    yield Finding(
        "memory", WARN if low else OK, text, "end other programs: Ray alone takes about 1 GiB" if low else ""
    )
    shm = Path("/dev/shm")
    if shm.exists() and shutil.disk_usage(shm).total < SHM_BYTES_MIN:
        size = shutil.disk_usage(shm).total / 2**20
        remedy = "in a container: --shm-size=2g (Docker), or a memory-backed volume at /dev/shm (Kubernetes)"
        yield Finding(
            "memory", WARN, f"/dev/shm has {size:.0f} MiB, too little for Ray's object store", remedy
        )


def _limits(config: ServiceConfig) -> Findings:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < OPEN_FILES_MIN:
        remedy = f"ulimit -n {min(65_536, hard) if hard > 0 else 65_536}"
        yield Finding("limits", WARN, f"{soft} open files allowed: about as many connections", remedy)
    proxies = [
        name for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if os.environ.get(name)
    ]
    if proxies:
        remedy = "export no_proxy=127.0.0.1,localhost"
        yield Finding(
            "limits", WARN, f"{', '.join(proxies)} set: clients may send local calls to a proxy", remedy
        )


def _model(config: ServiceConfig) -> Findings:
    from octavo.worker import default_model
    from octavo.worker.loader import read_model_info, resolve_model
    from octavo.worker.model_cache import models_root

    spec = config.model
    path = models_root() / default_model.NAME if spec is None else Path(spec).expanduser()
    if not path.exists():
        if spec is None:
            text = "the default model is not here yet; the first start fetches and converts it (about 30 s)"
            yield Finding("model", OK, text)
        elif spec.count("/") == 1 and not spec.startswith((".", "/", "~")):
            remedy = "check the spelling if you mean a folder"
            yield Finding("model", WARN, f"{spec} is no folder here: the start fetches it from a hub", remedy)
        else:
            yield Finding("model", FAIL, f"{path.absolute()} does not exist", "check the path, on every node")
        return
    if path.suffix.lower() == ".gguf":
        yield Finding(
            "model", OK, f"{path}: {path.stat().st_size / GIB:.2f} GiB, converted once at the first start"
        )
        return
    try:
        source = resolve_model(spec)
        info = read_model_info(source)
    except OctavoError as error:
        yield Finding(
            "model", FAIL, error.message, "check the folder: config.json, tokenizer and weights belong in it"
        )
        return
    size = sum(file.stat().st_size for file in source.folder.glob("*.safetensors"))
    weights = f", {size / GIB:.2f} GiB of weights" if size else ""
    yield Finding(
        "model", OK, f"{info.name}: {info.max_model_len} tokens, vocabulary {info.vocab_size}{weights}"
    )
    if config.max_model_len is not None and config.max_model_len > info.max_model_len:
        remedy = f"set max_model_len to at most {info.max_model_len}"
        yield Finding(
            "model", WARN, f"max_model_len is {config.max_model_len}, and the model's limit counts", remedy
        )
    available = psutil.virtual_memory().available
    if (
        size * config.num_workers > available
        and config.device in ("auto", "cpu")
        and config.ray_address is None
    ):
        remedy = "fewer workers, quantization, a smaller model, or a GPU"
        yield Finding("model", WARN, f"{config.num_workers} copies need more than the free memory", remedy)


def _port(config: ServiceConfig) -> Findings:
    if config.port == 0:
        yield Finding("port", OK, "any free one")
        return
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            remedy = "end what listens there, or choose another port (0: any free one)"
            yield Finding(
                "port", FAIL, f"cannot listen on {config.host}:{config.port}: {error.strerror}", remedy
            )
            return
    yield Finding("port", OK, f"{config.host}:{config.port} is free")
    if config.host not in ("127.0.0.1", "::1", "localhost") and not config.api_keys:
        remedy = "set api_keys, or put a proxy that asks for keys in front"
        yield Finding("port", WARN, f"{config.host} is reached by others, and no key is asked for", remedy)


def _ray(config: ServiceConfig) -> Findings:
    if config.ray_address is None:
        address = os.environ.get("RAY_ADDRESS")
        joins = f"; RAY_ADDRESS={address} is not followed" if address else ""
        remedy = "set ray_address to auto to join that cluster" if address else ""
        yield Finding("ray", WARN if address else OK, f"a local Ray will be started{joins}", remedy)
    elif config.ray_address != "auto":
        try:
            socket.create_connection(split_address(config.ray_address), CONNECT_SECONDS).close()
        except OSError as error:
            remedy = "ray start --head there, and open the port"
            yield Finding(
                "ray", FAIL, f"nobody answers at {config.ray_address}: {error.strerror or error}", remedy
            )
        else:
            yield Finding("ray", OK, f"{config.ray_address} answers")
    else:
        yield Finding("ray", OK, "the running cluster is looked for at start; `ray status` shows it")


def _jobs(config: ServiceConfig) -> Findings:
    folder = config.http_config().jobs_dir
    if folder is None:
        yield Finding("jobs", OK, "neither files nor batches are served")
        return
    path = Path(folder).absolute()
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if not os.access(there, os.W_OK):
        yield Finding(
            "jobs", FAIL, f"{there} cannot be written", "set jobs_dir to a folder of yours, or to nothing"
        )
    elif free < DISK_BYTES_MIN:
        yield Finding(
            "jobs", WARN, f"{free / GIB:.1f} GiB free at {there}", "uploads and results need room there"
        )
    else:
        yield Finding("jobs", OK, f"{folder}: {free / GIB:.0f} GiB free")


def _options(config: ServiceConfig) -> Findings:
    advice = config.setup_advice()
    for one in advice:
        yield Finding("options", WARN, one.reason, one.remedy)
    if not advice:
        yield Finding("options", OK, "nothing against them")


def as_json(findings: list[Finding]) -> dict[str, Any]:
    """JSON-able."""
    return {"ok": not any(one.failed for one in findings), "checks": [one.as_dict() for one in findings]}
