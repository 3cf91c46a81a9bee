"""`octavo serve`: the whole system on this machine, or on a Ray cluster that is already there."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cluster.cli.console import EXIT_FAILED, JsonOption, print_json, reports_errors

if TYPE_CHECKING:
    from octavo.cluster.service import Service

HEALTH_INTERVAL_SECONDS = 2.0


@reports_errors
def serve(
    model: Annotated[
        str | None, typer.Argument(help="Folder, hub id or .gguf file. Default: the small default model.")
    ] = None,
    *,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes, one device each.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="Of weights and KV: auto, float32, bfloat16 or float16.")
    ] = "auto",
    host: Annotated[
        str, typer.Option(help="Address to listen on; loopback unless you say otherwise.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8000,
    ray_address: Annotated[
        str | None, typer.Option(help="Join this Ray cluster ('auto' finds it) instead of starting one.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name in the API. Default: its own.")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="OCTAVO_API_KEY", show_envvar=True, help="Ask clients for this key; may be repeated."
        ),
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(help="Of weights, on a CPU: fp16 or int8. Faster and less exact. Default: none."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Let pages of this origin call from a browser; may be repeated, * is all."),
    ] = None,
    jobs_dir: Annotated[
        str | None,
        typer.Option(
            help="Folder of uploaded files and batches. Default: in the cache folder; empty: neither is served."
        ),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens in one block of the KV cache.")] = 16,
    num_blocks: Annotated[
        int | None, typer.Option(help="Blocks a worker. Default: from free memory.")
    ] = None,
    host_blocks: Annotated[
        int | None,
        typer.Option(
            help="Blocks of swap space a worker, in host memory. Default: from free memory; 0: none."
        ),
    ] = None,
    preemption: Annotated[
        str,
        typer.Option(
            help="How a request gives way when blocks run out: auto (the cheaper), swap or recompute."
        ),
    ] = "auto",
    victims: Annotated[str, typer.Option(help="Who gives way: least_lost or youngest.")] = "least_lost",
    prefix_cache: Annotated[
        bool, typer.Option(help="Keep the KV of prefixes while nobody needs its blocks, and find it again.")
    ] = True,
    host_tier: Annotated[
        bool, typer.Option(help="Keep prefixes that leave the device in swap space that nobody needs.")
    ] = True,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Most tokens in one step.")] = 512,
    max_num_seqs: Annotated[int, typer.Option(help="Most sequences in one step.")] = 256,
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Most tokens of prompt and answer together. Default: the model's limit."),
    ] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of free device memory to use.")] = 0.90,
    max_waiting: Annotated[
        int, typer.Option(help="Requests that may queue at each worker; one more is refused with 429.")
    ] = 4096,
    max_waiting_tokens: Annotated[
        int, typer.Option(help="Prompt tokens that may queue at each worker.")
    ] = 4_000_000,
    priority_aging_seconds: Annotated[
        float, typer.Option(help="Waiting so long is worth one step of priority.")
    ] = 60.0,
    tls_cert: Annotated[
        str | None,
        typer.Option(
            envvar="OCTAVO_TLS_CERT",
            show_envvar=True,
            help="With the next two: PEM file, on every node, of the certificate that workers, coordinator and "
            "ingresses show each other.",
        ),
    ] = None,
    tls_key: Annotated[
        str | None, typer.Option(envvar="OCTAVO_TLS_KEY", show_envvar=True, help="Its private key.")
    ] = None,
    tls_ca: Annotated[
        str | None,
        typer.Option(envvar="OCTAVO_TLS_CA", show_envvar=True, help="The authority that signed all of them."),
    ] = None,
    grace_seconds: Annotated[
        float, typer.Option(min=0, help="On SIGTERM or Ctrl-C, let running answers finish for so long.")
    ] = 30.0,
    json: JsonOption = False,
) -> None:
    """Serve a model over an OpenAI-compatible HTTP endpoint until interrupted.

    With --json, one JSON line when ready ({"event": "ready", "url", "model"}) and one when stopped.
    """
    from octavo.cluster.service import Service, ServiceConfig

    config = ServiceConfig(
        model=model,
        num_workers=workers,
        device=device,
        dtype=dtype,
        quantization=quantization,
        host=host,
        port=port,
        ray_address=ray_address,
        served_model_name=served_model_name,
        api_keys=tuple(api_key or ()),
        cors_origins=tuple(cors_origin or ()),
        jobs_dir=jobs_dir,
        block_size=block_size,
        num_blocks=num_blocks,
        host_blocks=host_blocks,
        preemption=preemption,
        victims=victims,
        prefix_cache=prefix_cache,
        host_tier=host_tier,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        gpu_memory_utilization=gpu_memory_utilization,
        max_waiting=max_waiting,
        max_waiting_tokens=max_waiting_tokens,
        priority_aging_seconds=priority_aging_seconds,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_ca=tls_ca,
    )
    service = Service(config)
    with _stop_signals() as stop:
        failed = True
        try:
            service.start(on_progress=_say)
            stop.started = True
            if json:
                print_json({"event": "ready", "url": service.url, "model": service.model_name})
            else:
                print(f"{service.model_name} is ready at {service.url}/v1 (Ctrl-C ends it)", flush=True)
            failed = not _wait(service, stop)
        finally:
            _say("stopping")
            service.stop(grace_seconds=0.0 if failed else grace_seconds)
            if json:
                print_json({"event": "stopped", "failed": failed})
    if failed:
        raise typer.Exit(EXIT_FAILED)


def _wait(service: Service, stop: _Stop) -> bool:
    """Until somebody asks to stop (True), or the system is beyond repair (False)."""
    while not stop.asked.wait(HEALTH_INTERVAL_SECONDS):
        if not service.alive():
            _say("octavo: the system has stopped working and does not recover")
            return False
    return True


class _Stop:
    """What SIGTERM and SIGINT do: interrupt a start that is under way; once started, ask for a graceful end; the
    second time, interrupt that too.
    """

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.started = False

    def on_signal(self, number: int, frame: object) -> None:
        if not self.started or self.asked.is_set():
            raise KeyboardInterrupt
        self.asked.set()


@contextmanager
def _stop_signals() -> Iterator[_Stop]:
    stop = _Stop()
    before = {number: signal.signal(number, stop.on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
