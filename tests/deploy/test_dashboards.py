"""Dashboards and alerts are made from names that exist, as Grafana and Prometheus want them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from octavo.cluster.metrics.dashboards import DASHBOARDS
from octavo.cluster.metrics.grafana import rendered
from octavo.cluster.metrics.table import METRICS, Kind

DEPLOY = Path(__file__).parents[2] / "deploy"


def names_of(expr: str) -> set[str]:
    return set(re.findall(r"\boctavo_\w+", re.sub(r"\bjob:octavo_\w+:\w+", "", expr)))


KNOWN = {
    name
    for metric in METRICS
    for name in (
        [f"{metric.name}_{part}" for part in ("bucket", "sum", "count")]
        if metric.kind is Kind.HISTOGRAM
        else [metric.name]
    )
}


@pytest.mark.parametrize("name", DASHBOARDS)
def test_files_are_up_to_date(name: str) -> None:
    text = (DEPLOY / "grafana" / name).read_text()
    assert text == rendered(DASHBOARDS[name]), (
        "run python -m octavo.cluster.metrics.dashboards deploy/grafana"
    )


@pytest.mark.parametrize("name", DASHBOARDS)
def test_dashboards_are_what_grafana_imports(name: str) -> None:
    page: dict[str, Any] = json.loads((DEPLOY / "grafana" / name).read_text())
    panels = page["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    variables = {variable["name"] for variable in page["templating"]["list"]}
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert [target["refId"] for target in panel["targets"]] == list("ABCDEFG"[: len(panel["targets"])])
        for target in panel["targets"]:
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= variables
            assert names_of(target["expr"]) <= KNOWN
            assert names_of(target["expr"])


def test_every_metric_is_shown_or_alerts() -> None:
    """What nobody looks at need not be counted; what is for reading alone is named here."""
    shown = {
        name
        for dashboard in DASHBOARDS.values()
        for panel in dashboard.panels()
        for query in panel.queries
        for name in names_of(query.expr)
    }
    for group in yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            names = names_of(rule["expr"])
            assert names <= KNOWN
            shown |= names
    unseen = {metric.name for metric in METRICS} - {
        re.sub("_(bucket|sum|count)$", "", name) for name in shown
    }
    assert unseen == {
        "octavo_kv_block_size_tokens",
        "octavo_kv_blocks_used_max",
        "octavo_kv_block_steps_total",
        "octavo_requests_submitted_total",
        "octavo_http_output_tokens_total",
        "octavo_http_choices_started_total",
        "octavo_http_choices_finished_total",
    }
