"""What a whole system is told: one frozen object, from which each part's own configuration is made.

Owns names, defaults and what only the whole can check. Options that a part owns are checked by that part, at
once, so that a wrong one need not wait for a cluster to be noticed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from octavo.cluster.openai.config import HttpConfig
from octavo.protos.auth import TlsFiles
from octavo.protos.errors import ConfigError
from octavo.scheduler.config import SchedulerConfig
from octavo.worker.config import WorkerConfig
from octavo.worker.model_cache import cache_root

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
"""In the name of a folder."""


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """Options of the whole system. Raises `ConfigError` naming the option."""

    model: str | None = None
    """None: the default model; else a folder, a .gguf file or a hub id."""
    num_workers: int = 1
    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port."""
    ray_address: str | None = None
    """None: start a local Ray, whatever the environment says; "auto" or "host:port": join that one."""
    num_ingresses: int = 1
    threads_per_worker: int | None = None
    """CPU threads; None: the cluster's cores shared evenly, at least 1."""
    served_model_name: str | None = None
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    """See `HttpConfig`."""
    jobs_dir: str | None = None
    """Folder of files and batches. None: one for this model in the cache folder; "": neither is served."""
    block_size: int = 16
    num_blocks: int | None = None
    host_blocks: int | None = None
    """Swap space of each worker in host memory; None: from free memory, 0: none."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.90
    preemption: str = "auto"
    victims: str = "least_lost"
    prefix_cache: bool = True
    host_tier: bool = True
    itl_target: float | None = None
    max_waiting: int = 4096
    max_waiting_tokens: int = 4_000_000
    """Of each worker's queue: requests, and their prompt tokens. One more is refused with 429."""
    priority_aging_seconds: float = 60.0
    """Waiting so long is worth one step of priority."""
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    """PEM files on every node, all or none: with them, processes of the system call each other by mTLS."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_workers", "num_ingresses"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}", param=name)
        if self.ray_address is not None and self.ray_address != "auto":
            split_address(self.ray_address)
        if isinstance(self.port, bool) or not isinstance(self.port, int) or not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be in [0, 65535], got {self.port!r}", param="port")
        if not isinstance(self.host, str) or not self.host:
            raise ConfigError(f"host must be an address, got {self.host!r}", param="host")
        # The parts check their own options; a wrong one should not wait for a cluster to be noticed.
        self.worker_configs(cores=1, device="cpu" if self.device == "auto" else self.device)
        SchedulerConfig(
            num_blocks=self.num_blocks or 1,
            num_host_blocks=1 if self.host_blocks is None else self.host_blocks,
            **self.scheduler_options(),
        )
        self.http_config()
        _ = self.tls_files

    @property
    def tls_files(self) -> TlsFiles | None:
        return TlsFiles.of(self.tls_cert, self.tls_key, self.tls_ca)

    def worker_configs(self, *, cores: int, device: str, count: int | None = None) -> list[WorkerConfig]:
        """One for each worker, on `device`, when the cluster has so many `cores`. `count`: in place of `num_workers`;
        each still gets the threads that it would have had at start."""
        return [
            WorkerConfig(
                worker_id=f"worker-{number}",
                model=self.model,
                device=device,
                dtype=self.dtype,
                quantization=self.quantization,
                block_size=self.block_size,
                num_blocks=self.num_blocks,
                num_host_blocks=self.host_blocks,
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_model_len=self.max_model_len,
                gpu_memory_utilization=self.gpu_memory_utilization,
                num_threads=self.threads_per_worker or max(1, cores // self.num_workers),
            )
            for number in range(count or self.num_workers)
        ]

    def scheduler_options(self) -> dict[str, Any]:
        """What of `SchedulerConfig` is configured rather than discovered."""
        return {
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "preemption": self.preemption,
            "victims": self.victims,
            "prefix_cache": self.prefix_cache,
            "host_tier": self.host_tier,
            "itl_target": self.itl_target,
            "max_waiting": self.max_waiting,
            "max_waiting_tokens": self.max_waiting_tokens,
            "priority_aging_seconds": self.priority_aging_seconds,
        }

    def http_config(self) -> HttpConfig:
        names = () if self.served_model_name is None else (self.served_model_name,)
        jobs_dir = self.jobs_dir
        if jobs_dir is None:
            # A server would refuse the batches of another model, so they must not meet.
            model = _UNSAFE.sub("_", self.served_model_name or self.model or "default")
            jobs_dir = str(cache_root() / "jobs" / model)
        return HttpConfig(
            served_model_names=names,
            api_keys=self.api_keys,
            cors_origins=self.cors_origins,
            jobs_dir=jobs_dir or None,
        )


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of "host:port". Raises `ConfigError`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in address:
        raise ConfigError(f"ray_address must be auto or HOST:PORT, got {address!r}", param="ray_address")
    return host, int(port)
