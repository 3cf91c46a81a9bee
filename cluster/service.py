"""The whole system from one process: a local Ray, or a cluster that is there, with everything on it.

Owns the order of starting and stopping. Nothing computes here. Start is concurrent, since most of it is waiting
for other processes to import and load: workers and coordinator come up while Serve does. Stop drains first and
leaves no process behind.
"""

from __future__ import annotations

import logging
import random
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from octavo.cluster.ray_access import require_token
from octavo.cluster.service_config import ServiceConfig, split_address
from octavo.protos.auth import Access, new_token
from octavo.protos.errors import ConfigError, StartupError
from octavo.protos.types import ModelInfo, WorkerInfo
from octavo.worker.loader import read_model_info, resolve_model

if TYPE_CHECKING:
    from octavo.cluster.system import System
    from octavo.worker.actor import BuildExecutor

__all__ = ["Service", "ServiceConfig"]

logger = logging.getLogger(__name__)

START_SECONDS_MAX = 600.0
"""Loading a large checkpoint from slow storage included."""
READY_SECONDS_MAX = 60.0
"""From loaded workers to the first good answer over HTTP."""
RECOVERY_SECONDS_MAX = 120.0
"""How long everything may be down before `alive` gives it up; a worker that was lost must load again."""
CALL_SECONDS = 10.0
"""Each try to reach something over HTTP or a socket."""
EXIT_SECONDS = 5.0
"""What is still there after Ray's shutdown and so long is killed."""

RAY_SETTINGS = {"worker_niceness": 0}
"""Of a local Ray. By default its workers give way to every other process of the machine, clients included, and a
server that answers people must not."""
RAY_STARTS_MAX = 2
"""Of a local Ray. One that fails has been waiting for itself for half a minute; a second one comes up."""
FREE_PORTS = range(20_000, 32_000)
"""Where port 0 is sought: below the ports that systems hand out to clients."""

SERVE_CONTROLLER = "SERVE_CONTROLLER_ACTOR"
"""Name of the actor that is there while Serve runs in a cluster."""

OnProgress = Callable[[str], None]


class Service:
    """`start`, then `url`, then `stop`, once each, from one thread. `stop` is due whatever `start` raised."""

    def __init__(self, config: ServiceConfig, *, build: BuildExecutor | None = None) -> None:
        """`build`: what makes a worker's executor, in place of the real one."""
        self.config = config
        self.timings: dict[str, float] = {}
        """Seconds from the start of `start` to the end of each stage, in order."""
        self.workers: list[WorkerInfo] = []
        """What the workers said of themselves at start."""
        self._build = build
        self._model: ModelInfo | None = None
        self._port = config.port
        self._system: System | None = None
        self._serve_started = False
        self._serve_was_there = False
        self._ray_started = False
        self._bystanders: set[int] = set()
        self._last_alive = 0.0
        self._advised: set[str] = set()
        self._access = Access(new_token(), config.tls_files)

    @property
    def url(self) -> str:
        """Base URL, without a slash at its end. A wildcard host is shown as loopback."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.config.host, self.config.host)
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    @property
    def model_name(self) -> str:
        """As clients call it. After `start`."""
        assert self._model is not None
        return self.config.served_model_name or self._model.name

    # --- start ---------------------------------------------------------------------------------------------

    def start(self, on_progress: OnProgress = lambda line: None) -> Service:
        """Bring everything up; returns when requests are answered. `on_progress` gets a line a stage.

        Raises `ConfigError` for what this machine or cluster cannot give, `ModelLoadError` for a checkpoint that
        is wrong, `StartupError` for a part that did not come up. Call `stop` then too.
        """
        began = time.monotonic()

        def stage(name: str, line: str) -> None:
            self.timings[name] = time.monotonic() - began
            on_progress(f"{line} ({self.timings[name]:.1f} s)")

        on_progress("checking the model")
        self._model = read_model_info(resolve_model(self.config.model))
        if self.config.port == 0:
            self._port = _choose_port(self.config.host)
        else:
            _check_port(self.config.host, self._port)
        stage("model", f"model {self._model.name} found")
        self._start_ray()
        stage("ray", "Ray is up" if self.config.ray_address is None else "joined the Ray cluster")
        # Ray is imported by whoever starts it, not by whoever reads a configuration.
        from octavo.cluster.system import System
        from octavo.worker.actor import build_executor

        self._system = System(
            self.config,
            access=self._access,
            loopback=self.config.ray_address is None,
            build=self._build or build_executor,
        )
        # The port opens once every checkpoint has been found good: a client never meets a server that cannot be.
        self.workers = self._system.wait_ready(
            START_SECONDS_MAX, lambda info: stage(info.worker_id, _describe(info))
        )
        self._start_serve()
        stage("serve", "HTTP is up")
        self._wait_answering()
        stage("ready", f"ready at {self.url}")
        self._last_alive = time.monotonic()
        return self

    def _start_ray(self) -> None:
        if self.config.ray_address is None:
            # Ray reads the mode when it is imported, and would not believe its own cluster afterwards.
            require_token()
        import ray

        if ray.is_initialized():
            raise StartupError("this process is already connected to a Ray cluster")
        self._bystanders = {child.pid for child in psutil.Process().children(recursive=True)}
        self._ray_started = True
        common: dict[str, Any] = {
            "namespace": _namespace(),
            "log_to_driver": False,
            "logging_level": logging.ERROR,
        }
        _check_ray_address(self.config.ray_address)
        where = self.config.ray_address or "a local cluster"
        local = {
            "address": "local",
            "include_dashboard": False,
            "_system_config": RAY_SETTINGS,
        }
        options = {"address": self.config.ray_address} if self.config.ray_address else local
        with _own_signals(), _quiet():
            for attempt in range(1, RAY_STARTS_MAX + 1):
                try:
                    ray.init(**options, **common)
                    return
                except Exception as error:
                    # Ray has no type for a node that does not come up, and now and then one does not.
                    ray.shutdown()
                    if self.config.ray_address is not None or attempt == RAY_STARTS_MAX:
                        raise StartupError(f"Ray did not come up at {where}: {error}") from error
                    logger.warning("a local Ray did not come up, trying again: %s", error)

    def _start_serve(self) -> None:
        import ray
        from ray import serve
        from ray.serve.schema import LoggingConfig

        from octavo.cluster.ingress import APP_NAME, IngressConfig, ingress_application

        known = ray.util.list_named_actors(all_namespaces=True)
        self._serve_was_there = any(actor["name"] == SERVE_CONTROLLER for actor in known)
        quiet = LoggingConfig(log_level="ERROR", enable_access_log=False)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        config = IngressConfig(
            model=self.config.model,
            max_model_len=self.config.max_model_len,
            num_replicas=self.config.num_ingresses,
            host=self.config.host,
            port=self._port,
            http=self.config.http_config(),
            access=self._access,
        )
        try:
            # Serve places and keeps the replicas. They listen themselves, so that no proxy is needed, and where the
            # cluster has one it leads to them only by `serve deploy`.
            serve.start(proxy_location="Disabled", logging_config=quiet)
            serve.run(ingress_application(config), name=APP_NAME, route_prefix=None, logging_config=quiet)
        except (ray.exceptions.RayError, RuntimeError) as error:
            # Ray's text is a traceback of another process; its last line says what happened there.
            reason = str(error).strip().splitlines()[-1].strip()
            raise StartupError(f"HTTP did not come up at {self.url}: {reason}") from error
        self._serve_started = True

    def _wait_answering(self) -> None:
        deadline = time.monotonic() + READY_SECONDS_MAX
        answer = "no answer"
        # A proxy of the user's shell has no business between us and ourselves.
        with httpx.Client(trust_env=False, timeout=CALL_SECONDS) as client:
            while time.monotonic() < deadline:
                try:
                    reply = client.get(f"{self.url}/ready")
                    if reply.status_code == httpx.codes.OK:
                        return
                    answer = reply.text
                except httpx.TransportError as error:
                    answer = f"{type(error).__name__}: {error}"
                time.sleep(0.05)
        raise StartupError(
            f"{self.url}/ready did not turn good within {READY_SECONDS_MAX:g} s: {answer:.200}"
        )

    # --- life ----------------------------------------------------------------------------------------------

    def alive(self) -> bool:
        """Look after the system; call it every few seconds. Workers are added or let go as was asked for.

        False once nothing has worked for `RECOVERY_SECONDS_MAX`: parts that are being restarted have had their time.
        """
        import ray

        assert self._system is not None
        try:
            report = self._system.poll()
            if report.status.alive:
                self._last_alive = time.monotonic()
            for one in report.advice:
                if one.code not in self._advised:
                    logger.warning("%s", one)
            self._advised = {one.code for one in report.advice}
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.warning("the coordinator does not answer: %s", type(error).__name__)
        return time.monotonic() - self._last_alive < RECOVERY_SECONDS_MAX

    def scale(self, num_workers: int) -> None:
        """Ask for so many workers; `alive` carries it out, `octavo scale` does the same from elsewhere. Raises
        `ConfigError` for less than one."""
        assert self._system is not None
        self._system.want(num_workers)

    def stats(self) -> dict[str, Any]:
        """Of all workers together. After `start`."""
        assert self._system is not None
        return self._system.stats()

    def stop(self, grace_seconds: float = 30.0) -> None:
        """Refuse new requests, let running ones finish for `grace_seconds`, then take everything down.

        Safe to call at any time, more than once, and after a `start` that failed.
        """
        if not self._ray_started:
            return
        import ray

        self._ray_started = False
        try:
            if ray.is_initialized():
                if self._system is not None:
                    self._system.drain(grace_seconds)
                if self.config.ray_address is not None:
                    self._leave_cluster()
        finally:
            ours = [
                child
                for child in psutil.Process().children(recursive=True)
                if child.pid not in self._bystanders
            ]
            with _own_signals():
                ray.shutdown()
            if self.config.ray_address is None:
                _end_processes(ours)

    def _leave_cluster(self) -> None:
        """What is ours goes; the cluster stays, and so does its Serve if it was there before."""
        from ray import serve

        from octavo.cluster.ingress import APP_NAME

        if self._serve_started and self._serve_was_there:
            serve.delete(APP_NAME)
        elif self._serve_started:
            serve.shutdown()
        if self._system is not None:
            self._system.kill()


def _namespace() -> str:
    from octavo.cluster.coordinator import NAMESPACE

    return NAMESPACE


def _describe(info: WorkerInfo) -> str:
    gib = info.num_blocks * info.kv_bytes_per_block / 2**30
    return f"{info.worker_id} on {info.device}, {info.dtype}: {info.num_blocks} KV blocks, {gib:.2f} GiB"


def _check_port(host: str, port: int) -> None:
    """Raise `ConfigError` when nobody could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As a replica's own socket: connections of a server that ended a moment ago do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}", param="port") from error


def _check_ray_address(address: str | None) -> None:
    """Raise `StartupError` when nobody listens there: Ray itself would try for minutes."""
    if address is None or address == "auto":
        return
    try:
        socket.create_connection(split_address(address), timeout=CALL_SECONDS).close()
    except OSError as error:
        raise StartupError(f"no Ray cluster at {address}: {error.strerror or error}") from error


def _choose_port(host: str) -> int:
    """A free port that Ray's processes, which start meanwhile, will not be given by the system."""
    for port in random.sample(FREE_PORTS, len(FREE_PORTS)):
        try:
            _check_port(host, port)
        except ConfigError:
            continue
        return port
    raise ConfigError(
        f"no free port from {FREE_PORTS.start} to {FREE_PORTS.stop - 1} on {host}", param="port"
    )


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray installs a SIGTERM handler of its own, which would end this process without draining."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _quiet() -> Iterator[None]:
    """Ray speaks to whoever calls `init`; our users did not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _end_processes(processes: list[psutil.Process]) -> None:
    """Wait for processes to end; kill those that do not."""
    _, left = psutil.wait_procs(processes, timeout=EXIT_SECONDS)
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
        logger.warning("killed process %d, which outlived Ray's shutdown", process.pid)
    psutil.wait_procs(left, timeout=EXIT_SECONDS)
