"""promtool on the alert rules: their syntax, and series that make each of them fire."""

from __future__ import annotations

import subprocess
from pathlib import Path

import yaml

from .prometheus import tool

PROMETHEUS = Path(__file__).parents[2] / "deploy/prometheus"
RULES = PROMETHEUS / "alerts.yaml"
CASES = Path(__file__).with_name("alerts_test.yaml")


def promtool(*arguments: str) -> None:
    done = subprocess.run([str(tool("promtool")), *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_configuration_and_rules_are_well_formed() -> None:
    promtool("check", "config", str(PROMETHEUS / "prometheus.yaml"))
    promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES))


def test_every_alert_fires_on_its_series_and_not_before(tmp_path: Path) -> None:
    cases = CASES.read_text().replace("RULES", str(RULES))
    path = tmp_path / "alerts_test.yaml"
    path.write_text(cases)
    promtool("test", "rules", str(path))
    alerts = {
        rule["alert"]
        for group in yaml.safe_load(RULES.read_text())["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    fired = {
        case["alertname"]
        for test in yaml.safe_load(cases)["tests"]
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert fired == alerts
