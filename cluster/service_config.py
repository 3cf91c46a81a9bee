"""What a whole system is told: one frozen model, from which each part's own configuration is made.

Owns the names, meanings and defaults of all options, and what only the whole can check. The command line's flags, the
environment's variables, the keys of a file (`config_sources.py`) and docs/configuration.md (`config_docs.py`) are made
from its fields, so an option is added here and nowhere else. Options that a part owns are checked by that part, at
once, so that a wrong one need not wait for a cluster to be noticed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from octavo.cluster.advice import Advice, setup_advice
from octavo.cluster.openai.config import HttpConfig
from octavo.cluster.openai.tool_parsers import TOOL_PARSERS
from octavo.protos.errors import ConfigError
from octavo.protos.tls import TlsFiles
from octavo.scheduler.autoscaling import AutoscalingConfig
from octavo.scheduler.config import PREEMPTION_MODES, VICTIM_RULES, SchedulerConfig
from octavo.scheduler.router import ROUTER_POLICIES, check_policy
from octavo.worker.config import (
    DEVICES,
    DTYPES,
    GUIDED_BACKENDS,
    KV_CACHE_DTYPES,
    QUANTIZATIONS,
    TOKEN_BUDGETS,
    WorkerConfig,
)
from octavo.worker.model_cache import cache_root

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
"""In the name of a folder."""
_HTTP, _SCHEDULER = HttpConfig(), SchedulerConfig(num_blocks=1)
_AUTOSCALING = AutoscalingConfig(workers_max=1)
_WORKER = WorkerConfig(worker_id="worker-0")
"""Whose defaults are the system's."""
_OPTION_OF = {
    "num_host_blocks": "host_blocks",
    "num_threads": "threads_per_worker",
    "served_model_names": "served_model_name",
    "workers_min": "scale_min",
    "workers_max": "scale_max",
    "wait_target": "scale_wait_target",
    "up_after": "scale_up_after",
    "down_after": "scale_down_after",
}
"""A part's name of an option -> ours, where they differ."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_HTTP_LIMITS = (
    "body_bytes_max",
    "file_bytes_max",
    "files_bytes_max",
    "batch_lines_in_flight_max",
    "requests_in_flight_max",
    "prompts_per_request_max",
    "choices_per_request_max",
)
"""Limits of `HttpConfig` that are options."""


def _option(default: Any, group: str, text: str, *, secret: bool = False, **names: str) -> Any:
    """A field. `secret`: never printed. `names`: `flag` and `env` where they do not follow from its own."""
    return Field(default, description=text, repr=not secret, json_schema_extra={"group": group, **names})


def _either(*choices: str) -> str:
    return ", ".join(f"`{choice}`" for choice in choices)


class ServiceConfig(BaseModel):
    """Options of the whole system. Raises `ConfigError` naming the option."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str | None = _option(
        None,
        "Model",
        "A folder, a hub id or a .gguf file. Unset: the small default model. On the command line the one argument.",
    )
    served_model_name: str | None = _option(None, "Model", "The model's name in the API. Unset: its own.")
    dtype: str = _option(_WORKER.dtype, "Model", f"Of weights and KV: {_either(*DTYPES)}.")
    quantization: str | None = _option(
        None, "Model", f"Of weights, on a CPU: {_either(*QUANTIZATIONS)}. Faster and less exact. Unset: none."
    )
    max_model_len: int | None = _option(
        None, "Model", "Most tokens of prompt and answer together. Unset: the model's limit."
    )
    guided_backend: str = _option(
        _WORKER.guided_backend, "Model", f"What compiles structured output: {_either(*GUIDED_BACKENDS)}."
    )
    tool_call_parser: str = _option(
        _HTTP.tool_call_parser,
        "Model",
        f"How the model writes calls of tools: {_either('auto', *TOOL_PARSERS)}; `auto` is what its chat template "
        "shows.",
    )

    num_workers: int = _option(1, "Machines", "Worker processes, one device each.", flag="--workers")
    scale_max: int | None = _option(
        None,
        "Machines",
        "Let the number of workers follow the load, up to so many. Unset: it stays.",
    )
    scale_min: int = _option(1, "Machines", "Fewest workers, while their number follows the load.")
    scale_wait_target: float = _option(
        _AUTOSCALING.wait_target,
        "Machines",
        "Seconds to the first token, its own prompt aside, above which a request that arrives now counts as waiting "
        "too long, and more workers are asked for.",
    )
    scale_up_after: float = _option(
        _AUTOSCALING.up_after,
        "Machines",
        "Seconds that the need for more workers must last, and the least between two such changes.",
    )
    scale_down_after: float = _option(
        _AUTOSCALING.down_after,
        "Machines",
        "Seconds that fewer workers must have been enough, and the least between two such changes.",
    )
    device: str = _option(_WORKER.device, "Machines", f"{_either(*DEVICES)}.")
    threads_per_worker: int | None = _option(
        None, "Machines", "CPU threads of a worker. Unset: the cluster's cores shared evenly."
    )
    ray_address: str | None = _option(
        None,
        "Machines",
        "Join this Ray cluster: `auto` finds it, or `HOST:PORT`. Unset: a local Ray is started, whatever the "
        "environment says.",
    )
    num_ingresses: int = _option(1, "Machines", "HTTP processes.")

    host: str = _option("127.0.0.1", "HTTP", "Address to listen on; loopback unless you say otherwise.")
    port: int = _option(8000, "HTTP", "0: any free port.")
    api_keys: tuple[str, ...] = _option(
        (),
        "HTTP",
        "Ask clients for one of these keys. None: open to all who reach the port.",
        secret=True,
        flag="--api-key",
        env="OCTAVO_API_KEY",
    )
    cors_origins: tuple[str, ...] = _option(
        (), "HTTP", "Let pages of these origins call from a browser; `*` is all.", flag="--cors-origin"
    )
    jobs_dir: str | None = _option(
        None,
        "HTTP",
        "Folder of uploaded files and batches. Unset: one for this model in the cache folder; empty: neither is "
        "served.",
    )
    grace_seconds: float = _option(
        30.0, "HTTP", "On SIGTERM or Ctrl-C, let running answers finish for so long."
    )
    body_bytes_max: int = _option(_HTTP.body_bytes_max, "HTTP", "Of one call.")
    requests_in_flight_max: int = _option(
        _HTTP.requests_in_flight_max,
        "HTTP",
        "Calls that generate, at once, in one HTTP process; more get 429.",
    )
    prompts_per_request_max: int = _option(_HTTP.prompts_per_request_max, "HTTP", "Of one completions call.")
    choices_per_request_max: int = _option(
        _HTTP.choices_per_request_max, "HTTP", "Prompts times branches, of one call."
    )
    file_bytes_max: int = _option(_HTTP.file_bytes_max, "HTTP", "Of one uploaded file.")
    files_bytes_max: int = _option(_HTTP.files_bytes_max, "HTTP", "Of all files together.")
    batch_lines_in_flight_max: int = _option(
        _HTTP.batch_lines_in_flight_max, "HTTP", "Lines of batches that run at once in one HTTP process."
    )

    block_size: int = _option(_WORKER.block_size, "Memory", "Tokens in one block of the KV cache: 16 or 32.")
    kv_cache_dtype: str = _option(
        _WORKER.kv_cache_dtype,
        "Memory",
        f"Of the KV cache: {_either(*KV_CACHE_DTYPES)}. `auto` is the model's; the others take a byte a number, less "
        "exactly.",
    )
    num_blocks: int | None = _option(None, "Memory", "Blocks of a worker. Unset: from free memory.")
    host_blocks: int | None = _option(
        None,
        "Memory",
        "Blocks of swap space of a worker, in host memory. Unset: from free memory; 0: none.",
    )
    gpu_memory_utilization: float = _option(
        _WORKER.gpu_memory_utilization, "Memory", "Share of free device memory to use."
    )
    allow_high_gpu_memory_utilization: bool = _option(
        _WORKER.allow_high_gpu_memory_utilization, "Memory", "Lets that share go above 0.95."
    )
    prefix_cache: bool = _option(
        _SCHEDULER.prefix_cache,
        "Memory",
        "Keep the KV of prefixes while nobody needs its blocks, and find it again.",
    )
    host_tier: bool = _option(
        _SCHEDULER.host_tier,
        "Memory",
        "Keep prefixes that leave the device in swap space that nobody needs.",
    )

    max_num_batched_tokens: int | None = _option(
        None,
        "Scheduling",
        "Most tokens in one step: the token budget. Unset: "
        f"{TOKEN_BUDGETS['cpu']} on a CPU, {TOKEN_BUDGETS['cuda']} on a GPU.",
    )
    max_num_seqs: int = _option(_SCHEDULER.max_num_seqs, "Scheduling", "Most sequences in one step.")
    itl_target: float | None = _option(
        None,
        "Scheduling",
        "Seconds that a step may take; the budget of each step is cut to what is predicted to fit. Unset: no cut.",
    )
    preemption: str = _option(
        _SCHEDULER.preemption,
        "Scheduling",
        f"How a request gives way when blocks run out: {_either(*PREEMPTION_MODES)}; `auto` takes the cheaper.",
    )
    victims: str = _option(
        _SCHEDULER.victims, "Scheduling", f"Who gives way first: {_either(*VICTIM_RULES)}."
    )
    router_policy: str = _option(
        "predicted_ttft", "Scheduling", f"Which worker gets a request: {_either(*ROUTER_POLICIES)}."
    )
    max_waiting: int = _option(
        _SCHEDULER.max_waiting, "Scheduling", "Requests that may queue at each worker; one more gets 429."
    )
    max_waiting_tokens: int = _option(
        _SCHEDULER.max_waiting_tokens, "Scheduling", "Prompt tokens that may queue at each worker."
    )
    priority_aging_seconds: float = _option(
        _SCHEDULER.priority_aging_seconds, "Scheduling", "Waiting so long is worth one step of priority."
    )
    seed: int = _option(0, "Scheduling", "Of the router's ties.")
    ui: bool | None = _option(
        None,
        "Observing",
        "Serve a page at `/ui` that shows what the system is doing now, read-only. Unset: only where `host` is "
        "loopback.",
    )
    recording: str | None = _option(
        None,
        "Observing",
        "Append what the coordinator is asked and decides to this file, on its node, prompts included; "
        "`octavo replay` makes every decision again.",
        flag="--record",
    )

    tls_cert: str | None = _option(
        None,
        "Security",
        "With the next two: a PEM file, at this path on every node, of the certificate that workers, coordinator and "
        "ingresses show each other (docs/security.md). Unset: their calls carry a token, in the clear.",
    )
    tls_key: str | None = _option(None, "Security", "Its private key.")
    tls_ca: str | None = _option(None, "Security", "The authority that signed all of them.")

    otlp_endpoint: str | None = _option(
        None,
        "Traces",
        "Where an OpenTelemetry collector takes traces over HTTP, such as http://127.0.0.1:4318/v1/traces; one span "
        "tree a request. Needs the extra `otel`. Unset: no traces.",
    )

    def __init__(self, **options: Any) -> None:
        # A file's lists are the tuples of a frozen model.
        options = {
            name: tuple(value) if isinstance(value, list) else value for name, value in options.items()
        }
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise _explained(error) from None

    def model_post_init(self, _: Any) -> None:
        for name in ("num_workers", "num_ingresses"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}", param=name)
        if self.ray_address is not None and self.ray_address != "auto":
            split_address(self.ray_address)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be in [0, 65535], got {self.port}", param="port")
        if not self.host:
            raise ConfigError("host must be an address, got ''", param="host")
        if not 0 <= self.grace_seconds < float("inf"):
            raise ConfigError(
                f"grace_seconds must be at least 0, got {self.grace_seconds}", param="grace_seconds"
            )
        try:
            check_policy(self.router_policy)
            device = "cpu" if self.device == "auto" else self.device
            self.worker_configs(cores=1, device=device)
            SchedulerConfig(
                num_blocks=self.num_blocks or 1,
                num_host_blocks=1 if self.host_blocks is None else self.host_blocks,
                **self.scheduler_options(device),
            )
            self.http_config()
            self._check_autoscaling()
        except ConfigError as error:
            raise _renamed(error) from None
        _ = self.tls_files

    @property
    def tls_files(self) -> TlsFiles | None:
        return TlsFiles.of(self.tls_cert, self.tls_key, self.tls_ca)

    def worker_configs(self, *, cores: int, device: str, count: int | None = None) -> list[WorkerConfig]:
        """One for each worker, on `device`, when the cluster has so many `cores`. `count`: in place of `num_workers`;
        each still gets the threads that it would have had at start, which leave room for as many as there may be."""
        most = self.scale_max or self.num_workers
        return [
            WorkerConfig(
                worker_id=f"worker-{number}",
                model=self.model,
                device=device,
                dtype=self.dtype,
                quantization=self.quantization,
                kv_cache_dtype=self.kv_cache_dtype,
                block_size=self.block_size,
                num_blocks=self.num_blocks,
                num_host_blocks=self.host_blocks,
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.token_budget(device),
                max_model_len=self.max_model_len,
                gpu_memory_utilization=self.gpu_memory_utilization,
                allow_high_gpu_memory_utilization=self.allow_high_gpu_memory_utilization,
                guided_backend=self.guided_backend,
                num_threads=self.threads_per_worker or max(1, cores // most),
            )
            for number in range(count or self.num_workers)
        ]

    def token_budget(self, device: str) -> int:
        """Of each step of a worker on `device`."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return TOKEN_BUDGETS["cpu" if device == "cpu" else "cuda"]

    def scheduler_options(self, device: str) -> dict[str, Any]:
        """What of `SchedulerConfig` is configured rather than discovered, for workers on `device`."""
        return {
            "max_num_batched_tokens": self.token_budget(device),
            "preemption": self.preemption,
            "victims": self.victims,
            "prefix_cache": self.prefix_cache,
            "host_tier": self.host_tier,
            "itl_target": self.itl_target,
            "max_waiting": self.max_waiting,
            "max_waiting_tokens": self.max_waiting_tokens,
            "priority_aging_seconds": self.priority_aging_seconds,
        }

    def autoscaling(self) -> AutoscalingConfig | None:
        """None: the number of workers stays."""
        if self.scale_max is None:
            return None
        return AutoscalingConfig(
            workers_min=self.scale_min,
            workers_max=self.scale_max,
            wait_target=self.scale_wait_target,
            up_after=self.scale_up_after,
            cooldown_up=self.scale_up_after,
            down_after=self.scale_down_after,
            cooldown_down=self.scale_down_after,
        )

    def _check_autoscaling(self) -> None:
        limits = self.autoscaling()
        if limits is not None and not limits.workers_min <= self.num_workers <= limits.workers_max:
            raise ConfigError(
                f"num_workers must be from {limits.workers_min} to {limits.workers_max} (scale_min and scale_max), "
                f"got {self.num_workers}",
                param="num_workers",
            )

    def setup_advice(self) -> tuple[Advice, ...]:
        """What is unwise about these options, though they are allowed."""
        return setup_advice(block_size=self.block_size, gpu_memory_utilization=self.gpu_memory_utilization)

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
            tool_call_parser=self.tool_call_parser,
            live_page=self.host in LOOPBACK if self.ui is None else self.ui,
            **{name: getattr(self, name) for name in _HTTP_LIMITS},
        )


def names_of(name: str, field: FieldInfo) -> tuple[str, str]:
    """(flag, variable of the environment) of an option."""
    extra = _extra(field)
    flag = str(extra.get("flag", f"--{name.replace('_', '-')}"))
    return flag, str(extra.get("env", f"OCTAVO_{name.upper()}"))


def group_of(field: FieldInfo) -> str:
    """The heading under which an option is shown."""
    return str(_extra(field)["group"])


def _extra(field: FieldInfo) -> dict[str, Any]:
    assert isinstance(field.json_schema_extra, dict)
    return field.json_schema_extra


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of "host:port". Raises `ConfigError`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in address:
        raise ConfigError(f"ray_address must be auto or HOST:PORT, got {address!r}", param="ray_address")
    return host, int(port)


_NOUNS = {"int": "an integer", "float": "a number", "bool": "true or false", "string": "a string"}


def noun_of(problem: str) -> str:
    """What was wanted, by the type of a problem that pydantic found."""
    return next((noun for start, noun in _NOUNS.items() if problem.startswith(start)), "a list of strings")


def _explained(error: ValidationError) -> ConfigError:
    """The first thing that is wrong, as a sentence."""
    first = error.errors(include_url=False)[0]
    name, kind = str(first["loc"][0]), first["type"]
    if kind == "extra_forbidden":
        return ConfigError(
            f"there is no option {name!r}{did_you_mean(name, ServiceConfig.model_fields)}", param=name
        )
    shown = ServiceConfig.model_fields[name].repr
    value = f"{first['input']!r:.100}" if shown else "something else"
    return ConfigError(f"{name} must be {noun_of(kind)}, got {value}", param=name)


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.75) -> str:
    """A suggestion to append to a message, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]}?" if near else ""


def _renamed(error: ConfigError) -> ConfigError:
    """A part's complaint in the words of whoever configured the whole."""
    ours = _OPTION_OF.get(error.param or "")
    if ours is None:
        return error
    return ConfigError(error.message.replace(error.param or "", ours), param=ours)
