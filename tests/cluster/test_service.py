"""The whole system on a local Ray, with workers that have no model: one cluster for the module."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import grpc
import httpx
import psutil
import pytest

from octavo.cluster import ray_access
from octavo.cluster import service as service_module
from octavo.cluster.service import Service, ServiceConfig
from octavo.protos.errors import ConfigError, ModelLoadError, StartupError
from octavo.worker.config import WorkerConfig

from ..chaos import job
from ..scheduler import fake_worker
from . import support

PROMPT = [19556, 905, 17]
NUM_BLOCKS = 200
STEP_SECONDS = 0.02


def build_fake(config: WorkerConfig) -> support.FakeExecutor:
    from octavo.worker.loader import read_model_info, resolve_model

    model = read_model_info(resolve_model(config.model))
    info = support.worker_info(
        config.worker_id,
        model=model,
        num_blocks=config.num_blocks,
        max_num_seqs=config.max_num_seqs,
        # As measured by a real one at start, so that workers can be compared from the first request on.
        prefill_tokens_per_second=20_000.0,
        decode_step_seconds=STEP_SECONDS,
    )
    return support.FakeExecutor(info, budget=config.max_num_batched_tokens, step_seconds=STEP_SECONDS)


def build_broken(config: WorkerConfig) -> support.FakeExecutor:
    raise ModelLoadError("model.layers.3.mlp.up_proj.weight is missing")


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


class System:
    """A running service and a client for it."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.before = set(psutil.Process().children(recursive=True))
        self.lines: list[str] = []
        self.client = httpx.Client(timeout=60.0)

    def start(self) -> None:
        self.service.start(on_progress=self.lines.append)
        self.client.base_url = self.service.url

    def body(self, **changes):
        return {
            "prompt": PROMPT,
            "max_tokens": 20,
            "temperature": 0,
            "ignore_eos": True,
            "seed": 3,
            **changes,
        }

    def complete(self, **changes) -> httpx.Response:
        return self.client.post("/v1/completions", json=self.body(**changes))

    def stats(self):
        return self.service.stats()

    def idle(self) -> bool:
        stats = self.stats()
        return stats["unfinished"] == stats["running"] == stats["waiting"] == stats["blocks_used"] == 0

    def worker_process(self, worker_id: str) -> psutil.Process:
        import ray

        from octavo.cluster.coordinator import NAMESPACE, worker_actor_name

        actor = ray.get_actor(worker_actor_name(worker_id), namespace=NAMESPACE)
        return psutil.Process(ray.get(actor.pid.remote()))

    def processes(self, name: str) -> list[psutil.Process]:
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if name in " ".join(process.cmdline()):
                    found.append(process)
        return found


class Calls:
    """The same completion asked for by several clients at once."""

    def __init__(self, system: System, count: int, **changes) -> None:
        self._replies: list[httpx.Response] = []
        ask = lambda: self._replies.append(system.complete(**changes))  # noqa: E731
        self._threads = [threading.Thread(target=ask) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def texts(self) -> list[str]:
        """Once all have ended, and ended well."""
        for thread in self._threads:
            thread.join()
        assert [reply.status_code for reply in self._replies] == [200] * len(self._threads)
        return [reply.json()["choices"][0]["text"] for reply in self._replies]


@pytest.fixture(scope="module")
def system(default_model_dir, tmp_path_factory):
    import sys

    from ray import cloudpickle

    # Workers are other processes and know nothing of the tests' modules.
    for module in (sys.modules[__name__], support, fake_worker):
        cloudpickle.register_pickle_by_value(module)
    config = ServiceConfig(
        model=str(default_model_dir),
        num_workers=2,
        device="cpu",
        port=0,
        num_blocks=NUM_BLOCKS,
        jobs_dir=str(tmp_path_factory.mktemp("jobs")),
    )
    system = System(Service(config, build=build_fake))
    try:
        system.start()
        yield system
    finally:
        system.service.stop(grace_seconds=0.0)


@pytest.mark.cluster
class TestRunning:
    def test_answers_and_says_what_came_up(self, system):
        reply = system.complete(n=2)
        assert reply.status_code == 200
        assert [choice["finish_reason"] for choice in reply.json()["choices"]] == ["length", "length"]
        assert reply.json()["usage"]["completion_tokens"] == 40
        assert list(system.service.timings)[:2] == ["model", "ray"]
        assert {"serve", "worker-0", "worker-1", "ready"} <= set(system.service.timings)
        assert any("worker-1 on cpu" in line for line in system.lines)
        assert sorted(info.worker_id for info in system.service.workers) == ["worker-0", "worker-1"]
        assert system.service.model_name == system.client.get("/v1/models").json()["data"][0]["id"]
        assert system.service.alive()

    def test_its_inside_is_on_loopback_and_its_ray_asks_for_a_token(self, system):
        import ray

        address = ray.get(system.service._system._coordinator.address.remote())
        assert address.startswith("127.0.0.1:")
        process = system.worker_process("worker-0")
        listening = {
            one.laddr.ip.removeprefix("::ffff:")
            for one in process.net_connections("inet")
            if one.status == psutil.CONN_LISTEN
        }
        # The other is Ray's own, which it opens everywhere.
        assert "127.0.0.1" in listening
        assert process.environ()["RAY_AUTH_MODE"] == "token"

    def test_its_ray_refuses_whoever_has_no_token_or_another(self, system):
        """At the ports that Ray opens on every interface: its store's, the raylet's, and that of each worker."""
        import ray
        from ray.core.generated import (
            core_worker_pb2,
            core_worker_pb2_grpc,
            gcs_service_pb2,
            gcs_service_pb2_grpc,
            node_manager_pb2,
            node_manager_pb2_grpc,
        )

        (node,) = [node for node in ray.nodes() if node["Alive"]]
        (worker_port,) = {
            one.laddr.port
            for one in system.worker_process("worker-0").net_connections("inet")
            if one.status == psutil.CONN_LISTEN and one.laddr.ip.removeprefix("::ffff:") != "127.0.0.1"
        }
        host = node["NodeManagerAddress"]
        doors = {
            ray.get_runtime_context().gcs_address: lambda channel: (
                gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel).GetAllNodeInfo,
                gcs_service_pb2.GetAllNodeInfoRequest(),
            ),
            f"{host}:{node['NodeManagerPort']}": lambda channel: (
                node_manager_pb2_grpc.NodeManagerServiceStub(channel).GetNodeStats,
                node_manager_pb2.GetNodeStatsRequest(),
            ),
            f"{host}:{worker_port}": lambda channel: (
                core_worker_pb2_grpc.CoreWorkerServiceStub(channel).GetCoreWorkerStats,
                core_worker_pb2.GetCoreWorkerStatsRequest(),
            ),
        }
        ours = os.environ.get("RAY_AUTH_TOKEN") or ray_access.token_path().read_text()
        for address, door in doors.items():
            with grpc.insecure_channel(address) as channel:
                call, request = door(channel)
                for token in (None, "0" * 64):
                    metadata = None if token is None else [("authorization", f"Bearer {token}")]
                    with pytest.raises(grpc.RpcError) as refusal:
                        call(request, metadata=metadata, timeout=10)
                    assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
                # So that what was refused is the token, and not the call.
                call(request, metadata=[("authorization", f"Bearer {ours}")], timeout=10)

    def test_a_stream_says_what_a_reply_says(self, system):
        whole = system.complete().json()["choices"][0]["text"]
        text = ""
        with system.client.stream("POST", "/v1/completions", json=system.body(stream=True)) as stream:
            events = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
        assert events.pop() == "[DONE]"
        for event in events:
            text += json.loads(event)["choices"][0]["text"]
        assert text == whole

    def test_health_and_metrics_come_from_the_coordinator(self, system):
        health = system.client.get("/health")
        assert health.status_code == 200
        assert [worker["status"] for worker in health.json()["workers"]] == ["ready", "ready"]
        assert "octavo_generation_tokens_total" in system.client.get("/metrics").text

    def test_only_loopback_listens(self, system):
        """Ours: the HTTP port, and the gRPC ports of coordinator and workers."""
        for process in [*system.processes("ray::Coordinator"), *system.processes("ray::WorkerActor")]:
            listening = {c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
            # "::" is the port of Ray's own core, which asks for the cluster's token.
            assert listening <= {"127.0.0.1", "::ffff:127.0.0.1", "::"}
            assert listening - {"::"}
        url = httpx.URL(system.service.url)
        assert url.host == "127.0.0.1"

    def test_the_http_process_has_no_torch(self, system):
        for name in ("ray::ServeReplica", "ray::Coordinator"):
            (process,) = system.processes(name)
            assert not [entry.path for entry in process.memory_maps() if "torch" in entry.path]

    @pytest.mark.parametrize("stream", [True, False], ids=["streaming", "plain"])
    def test_d20_a_client_that_leaves_frees_its_blocks(self, system, stream):
        wait_for(system.idle, 10)
        aborted = system.stats()["requests"]["aborted"]
        body = system.body(stream=stream, max_tokens=2000)
        if stream:
            with system.client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                for _ in range(4):
                    next(lines)
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{system.service.url}/v1/completions", json=body, timeout=0.5)
        wait_for(system.idle, 2)
        assert system.stats()["requests"]["aborted"] == aborted + 1

    def test_d20_many_clients_that_leave_at_once(self, system):
        aborted = system.stats()["requests"]["aborted"]

        def leave() -> None:
            with contextlib.suppress(httpx.ReadTimeout):
                httpx.post(
                    f"{system.service.url}/v1/completions", json=system.body(max_tokens=2000), timeout=2.0
                )

        threads = [threading.Thread(target=leave) for _ in range(40)]
        for thread in threads:
            thread.start()
        wait_for(lambda: system.stats()["unfinished"] > 20, 10)
        for thread in threads:
            thread.join()
        wait_for(system.idle, 4)
        assert system.stats()["requests"]["aborted"] >= aborted + 20
        assert system.complete().status_code == 200

    def test_a_model_that_does_not_load_is_said_by_its_name(self, system, monkeypatch):
        from octavo.cluster import fleet as fleet_module
        from octavo.cluster.fleet import Fleet

        monkeypatch.setattr(fleet_module, "CPU_SHARE", 0.1)  # the two workers have taken most

        config = WorkerConfig(worker_id="worker-9", device="cpu", num_threads=1)
        fleet = Fleet([config], loopback=True, build=build_broken)
        try:
            with pytest.raises(ModelLoadError, match=r"up_proj\.weight is missing"):
                fleet.wait_ready(60)
        finally:
            fleet.kill()

    def test_d22_a_killed_worker_costs_its_clients_a_pause_and_comes_back(self, system):
        wait_for(system.idle, 10)
        alone = system.complete(max_tokens=300).json()["choices"][0]["text"]
        calls = Calls(system, 8, max_tokens=300)
        wait_for(lambda: system.stats()["running"] == 8, 10)
        steps = system.stats()["steps"]
        busiest = max(system.stats()["workers"].items(), key=lambda item: item[1]["running"])[0]
        moved = system.stats()["moved"]
        lost = system.stats()["workers"][busiest]["running"]
        system.worker_process(busiest).send_signal(signal.SIGKILL)
        wait_for(lambda: system.client.get("/health").json()["status"] == "degraded", 10)
        assert f"{busiest} dead" in system.client.get("/health").json()["detail"]
        assert system.complete().status_code == 200, "the other worker goes on"
        assert calls.texts() == [alone] * 8
        assert system.stats()["moved"] == moved + lost
        wait_for(lambda: system.client.get("/health").json()["status"] == "ready", 60)
        assert system.stats()["steps"] >= steps, "counters never fall"
        assert len(system.processes("ray::WorkerActor")) == 2
        wait_for(system.idle, 10)

    def test_d22_a_frozen_worker_is_given_up_and_its_process_replaced(self, system):
        wait_for(system.idle, 10)
        alone = system.complete(max_tokens=200).json()["choices"][0]["text"]
        calls = Calls(system, 8, max_tokens=200)
        wait_for(lambda: system.stats()["running"] == 8, 10)
        frozen = system.worker_process("worker-0")
        frozen.send_signal(signal.SIGSTOP)
        wait_for(lambda: system.client.get("/health").json()["status"] == "degraded", 20)
        assert calls.texts() == [alone] * 8
        wait_for(lambda: not frozen.is_running() or frozen.status() == psutil.STATUS_ZOMBIE, 20)
        wait_for(lambda: system.client.get("/health").json()["status"] == "ready", 60)
        assert len(system.processes("ray::WorkerActor")) == 2
        wait_for(system.idle, 10)

    @pytest.mark.parametrize("with_worker", [False, True], ids=["alone", "and a worker within a second"])
    def test_d22_a_killed_coordinator_costs_all_clients_a_pause(self, system, with_worker):
        wait_for(system.idle, 10)
        alone = system.complete(max_tokens=200).json()["choices"][0]["text"]
        calls = Calls(system, 8, max_tokens=200)
        wait_for(lambda: system.stats()["running"] == 8, 10)
        (process,) = system.processes("ray::Coordinator")
        worker = system.worker_process("worker-0")
        process.send_signal(signal.SIGKILL)
        if with_worker:
            worker.send_signal(signal.SIGKILL)
        assert calls.texts() == [alone] * 8

        def ready() -> bool:
            reply = system.client.get("/ready")
            return reply.status_code == 200 and reply.json()["status"] == "ready"

        wait_for(ready, 60)
        assert system.complete().status_code == 200
        (again,) = system.processes("ray::Coordinator")
        assert again.pid != process.pid
        assert system.stats()["requests"]["failed"] == 0
        wait_for(system.idle, 10)

    def test_a_batch_outlives_coordinator_worker_and_http_process(self, system, tmp_path):
        """`python -m tests.chaos.job` does it with 2,000 lines and a model."""
        wait_for(system.idle, 10)
        path = job.write_job(tmp_path / "in.jsonl", 300, max_tokens=20, logprobs=None)
        outcome = job.run(system.service, path)
        assert outcome.lines == 300
        assert outcome.wrong == []
        assert outcome.moved > 0
        wait_for(lambda: system.client.get("/health").json()["status"] == "ready", 60)
        wait_for(system.idle, 10)

    def test_d23_fewer_workers_and_more_again_cut_no_answer(self, system, monkeypatch):
        import ray

        wait_for(system.idle, 10)
        monkeypatch.setattr(system.service._system._scaler, "_grace_seconds", 1.0)
        alone = system.complete(max_tokens=250).json()["choices"][0]["text"]
        calls = Calls(system, 8, max_tokens=250)
        wait_for(lambda: system.stats()["running"] == 8, 10)
        assert all(worker["running"] for worker in system.stats()["workers"].values())

        def workers() -> list[str]:
            assert system.service.alive()
            health = system.client.get("/health").json()
            return [f"{worker['worker_id']} {worker['status']}" for worker in health["workers"]]

        system.service.scale(1)
        wait_for(lambda: "worker-1 draining" in workers(), 10)
        assert system.client.get("/health").json()["status"] == "ready"
        assert system.complete().status_code == 200
        wait_for(lambda: workers() == ["worker-0 ready"], 20)
        wait_for(lambda: workers() and len(system.processes("ray::WorkerActor")) == 1, 20)
        assert calls.texts() == [alone] * 8
        # One that is started anew is told what there is by now.
        (process,) = system.processes("ray::Coordinator")
        process.send_signal(signal.SIGKILL)
        wait_for(lambda: system.client.get("/ready").status_code == 503, 10)
        wait_for(lambda: workers() == ["worker-0 ready"], 30)
        with pytest.raises(ConfigError):
            system.service.scale(0)
        command = [sys.executable, "-c", "from octavo.cluster.cli.app import run; run()", "scale", "--json"]
        options = ["--workers", "2", "--ray-address", ray.get_runtime_context().gcs_address]
        with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as asked:
            wait_for(lambda: workers() and asked.poll() is not None, 90)
            assert asked.returncode == 0, asked.stderr.read()
            assert json.loads(asked.stdout.read()) == {"workers": 2, "ready": True}
        assert workers() == ["worker-0 ready", "worker-1 ready"]
        system.service.scale(99)
        coordinator = system.service._system._coordinator

        def refusal() -> str:
            workers()
            return ray.get(coordinator.scaling.remote())[0].refusal or ""

        wait_for(lambda: "99 workers need" in refusal(), 10)
        assert workers() == ["worker-0 ready", "worker-1 ready"]
        assert system.complete(max_tokens=250).json()["choices"][0]["text"] == alone

    def test_metrics_reach_rays_own_port(self, system):
        import ray

        (node,) = [node for node in ray.nodes() if node["Alive"]]
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        wanted = {
            "octavo_requests_running",
            "octavo_generation_tokens_total",
            "octavo_inter_token_latency_seconds_bucket",
            "octavo_router_decisions_total",
            "octavo_http_requests_total",
        }

        def told():
            return set(re.findall(r"^ray_(octavo_\w+)\{", httpx.get(url).text, re.MULTILINE))

        wait_for(lambda: wanted <= told(), 60)

    def test_d23_stop_lets_streams_finish_refuses_new_ones_and_leaves_nothing(self, system):
        lines: list[str] = []
        started = threading.Event()

        def follow() -> None:
            body = system.body(stream=True, max_tokens=100)
            with httpx.stream(
                "POST", f"{system.service.url}/v1/completions", json=body, timeout=60
            ) as stream:
                for line in stream.iter_lines():
                    if line:
                        lines.append(line)
                        started.set()

        follower = threading.Thread(target=follow)
        follower.start()
        assert started.wait(20)
        ours = [child for child in psutil.Process().children(recursive=True) if child not in system.before]
        assert ours
        refused: list[int] = []

        def ask_late() -> None:
            wait_for(lambda: system.client.get("/ready").status_code == 503, 10)
            refused.append(system.complete().status_code)

        late = threading.Thread(target=ask_late)
        late.start()
        system.service.stop(grace_seconds=30.0)
        follower.join(10)
        late.join(10)
        assert lines[-1] == "data: [DONE]"
        assert sum('"text"' in line for line in lines) > 10
        assert refused == [503]
        assert [process for process in ours if process.is_running()] == []
        system.service.stop()


class TestConfig:
    @pytest.mark.parametrize(
        ("options", "param"),
        [
            ({"num_workers": 0}, "num_workers"),
            ({"num_ingresses": True}, "num_ingresses"),
            ({"port": 70000}, "port"),
            ({"port": "80"}, "port"),
            ({"ray_address": "somewhere"}, "ray_address"),
            ({"ray_address": "ray://head:10001"}, "ray_address"),
            ({"host": ""}, "host"),
            ({"device": "tpu"}, "device"),
            ({"dtype": "int3"}, "dtype"),
            ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization"),
            ({"preemption": "banana"}, "preemption"),
            ({"preemption": "swap", "host_blocks": 0}, "preemption"),
            ({"host_blocks": -1}, "host_blocks"),
            ({"victims": "oldest"}, "victims"),
            ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
            ({"api_keys": ("",)}, "api_keys"),
            ({"served_model_name": ""}, "served_model_name"),
        ],
    )
    def test_wrong_options_are_named(self, options, param):
        with pytest.raises(ConfigError) as error:
            ServiceConfig(**options)
        assert error.value.param == param

    def test_swap_is_passed_to_both_sides(self):
        config = ServiceConfig(preemption="swap", victims="youngest", host_blocks=7)
        assert config.worker_configs(cores=1, device="cpu")[0].num_host_blocks == 7
        assert config.scheduler_options("cpu")["preemption"] == "swap"
        assert config.scheduler_options("cpu")["victims"] == "youngest"
        assert ServiceConfig(preemption="swap").host_blocks is None

    def test_the_token_budget_follows_the_device(self):
        for device, budget in (("cpu", 256), ("cuda", 512), ("cuda:1", 512)):
            config = ServiceConfig()
            assert config.worker_configs(cores=1, device=device)[0].max_num_batched_tokens == budget
            assert config.scheduler_options(device)["max_num_batched_tokens"] == budget
        assert ServiceConfig(max_num_batched_tokens=64).token_budget("cpu") == 64
        with pytest.raises(ConfigError, match="max_num_batched_tokens"):
            ServiceConfig(max_num_batched_tokens=0)

    def test_cores_are_shared_evenly(self):
        configs = ServiceConfig(num_workers=3).worker_configs(cores=8, device="cpu")
        assert [config.num_threads for config in configs] == [2, 2, 2]
        assert [config.worker_id for config in configs] == ["worker-0", "worker-1", "worker-2"]
        assert ServiceConfig(num_workers=3).worker_configs(cores=2, device="cpu")[0].num_threads == 1

    def test_a_cluster_that_is_too_small(self):
        from octavo.cluster.fleet import check_resources

        configs = ServiceConfig(num_workers=2).worker_configs(cores=4, device="cuda")
        with pytest.raises(ConfigError, match="2 workers need 2 GPU; the cluster has 1"):
            check_resources(configs, {"CPU": 4.0, "GPU": 1.0})
        check_resources(configs, {"CPU": 4.0, "GPU": 2.0})


class TestBeforeAnythingStarts:
    @pytest.fixture(autouse=True)
    def _no_ray(self, monkeypatch):
        monkeypatch.setattr(Service, "_start_ray", lambda self: pytest.fail("Ray was started"))

    def test_d27_a_model_that_does_not_exist(self, tmp_path):
        service = Service(ServiceConfig(model=str(tmp_path / "nowhere"), port=0))
        with pytest.raises(ModelLoadError, match="nowhere"):
            service.start()
        service.stop()

    def test_a_port_in_use(self, default_model_dir):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            service = Service(ServiceConfig(model=str(default_model_dir), port=port))
            with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}"):
                service.start()

    def test_wildcard_hosts_are_shown_as_loopback(self):
        assert Service(ServiceConfig(host="0.0.0.0", port=1)).url == "http://127.0.0.1:1"
        assert Service(ServiceConfig(host="::", port=1)).url == "http://[::1]:1"


def test_a_cluster_that_does_not_answer_is_said(default_model_dir):
    """And SIGTERM is still ours afterwards: Ray takes it over when it starts."""
    before = signal.getsignal(signal.SIGTERM)
    service = Service(ServiceConfig(model=str(default_model_dir), port=0, ray_address="127.0.0.1:1"))
    with pytest.raises(StartupError, match=r"127\.0\.0\.1:1"):
        service.start()
    service.stop()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("failures", "comes_up"), [(1, True), (2, False)])
def test_a_local_ray_that_does_not_come_up_is_tried_once_more(monkeypatch, failures, comes_up):
    import ray

    tries = []

    def init(**options):
        tries.append(options["address"])
        if len(tries) <= failures:
            raise Exception("the current node timed out during startup")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    service = Service(ServiceConfig(num_workers=1))
    if comes_up:
        service._start_ray()
    else:
        with pytest.raises(StartupError, match="timed out"):
            service._start_ray()
    assert tries == ["local", "local"]


def test_processes_that_outlive_shutdown_are_killed(monkeypatch):
    monkeypatch.setattr(service_module, "EXIT_SECONDS", 0.2)
    stubborn = psutil.Popen(["sleep", "60"])
    service_module._end_processes([stubborn])
    assert not stubborn.is_running() or stubborn.status() == psutil.STATUS_ZOMBIE
    stubborn.wait()


@pytest.mark.model
def test_d27_a_wrong_tensor_shape_ends_the_start_before_the_port_opens(default_model_dir, tmp_path):
    folder = tmp_path / "wrong"
    folder.mkdir()
    for file in default_model_dir.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(
        json.dumps({**config, "intermediate_size": config["intermediate_size"] + 64})
    )
    port = service_module._choose_port("127.0.0.1")
    code = "from octavo.cluster.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", str(folder), "--workers", "1", "--port", str(port)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    opened = False
    while run.poll() is None:
        with socket.socket() as probe:
            opened |= probe.connect_ex(("127.0.0.1", port)) == 0
        time.sleep(0.1)
    assert run.returncode not in (0, -signal.SIGKILL)
    assert not opened
    _, errors = run.communicate()
    last = errors.strip().splitlines()[-1]
    assert "_proj.weight" in last, errors
    assert "Traceback" not in errors
