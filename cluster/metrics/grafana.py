"""Dashboards as data, and as the JSON that Grafana imports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3
_SCHEMA_VERSION = 39
"""Of Grafana 10.4 and later, which read older ones."""


@dataclass(frozen=True, slots=True)
class Query:
    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    """Of Grafana's units: s, bytes, Bps, percentunit, reqps, short."""
    text: str = ""
    kind: str = "timeseries"
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    uid: str
    title: str
    rows: tuple[Row, ...]
    by_worker: bool = False
    """Whether the page shows the workers that its reader chose."""

    def panels(self) -> Iterator[Panel]:
        for row in self.rows:
            yield from row.panels


def to_json(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in dashboard.rows:
        place = {"h": 1, "w": _WIDTH * _COLUMNS, "x": 0, "y": top}
        panels.append(
            {"type": "row", "id": len(panels) + 1, "title": row.title, "gridPos": place, "panels": []}
        )
        top += 1
        for number, panel in enumerate(row.panels):
            place = {
                "h": _HEIGHT,
                "w": _WIDTH,
                "x": number % _COLUMNS * _WIDTH,
                "y": top + number // _COLUMNS * _HEIGHT,
            }
            panels.append({"id": len(panels) + 1, "gridPos": place, **_panel(panel)})
        top += -(-len(row.panels) // _COLUMNS) * _HEIGHT
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["octavo"],
        "schemaVersion": _SCHEMA_VERSION,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables(dashboard)},
        "panels": panels,
    }


def _panel(panel: Panel) -> dict[str, Any]:
    heatmap = panel.kind == "heatmap"
    custom: dict[str, Any] = {} if heatmap else {"fillOpacity": 10, "showPoints": "never"}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    options: dict[str, Any] = (
        {"calculate": False, "yAxis": {"unit": panel.unit}}
        if heatmap
        else {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    )
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": _SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
                "format": "heatmap" if heatmap else "time_series",
            }
            for number, query in enumerate(panel.queries)
        ],
    }


def _variables(dashboard: Dashboard) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    ]
    if dashboard.by_worker:
        query = "label_values(octavo_requests_running, worker)"
        found.append(
            {
                "name": "worker",
                "type": "query",
                "datasource": _SOURCE,
                "definition": query,
                "query": {"query": query, "refId": "worker"},
                "refresh": 2,
                "multi": True,
                "includeAll": True,
                "allValue": ".*",
                "current": {"text": "All", "value": "$__all"},
            }
        )
    return found


def rendered(dashboard: Dashboard) -> str:
    return json.dumps(to_json(dashboard), indent=1) + "\n"
