"""The table of metrics keeps Prometheus' rules, and every row is told by a system that runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from octavo.cluster.metrics import reference
from octavo.cluster.metrics.table import METRICS, Kind, Metric, Scope

UNITS = ("seconds", "bytes", "tokens", "ratio")
IDS = [metric.name for metric in METRICS]


@pytest.mark.parametrize("metric", METRICS, ids=IDS)
def test_names_keep_prometheus_rules(metric: Metric) -> None:
    assert re.fullmatch(r"octavo(_[a-z]+)+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    assert not metric.name.endswith(("_count", "_sum", "_bucket", "_created"))
    assert "milli" not in metric.name
    assert metric.help.endswith(".") or metric.name == "octavo_backend_up"
    assert metric.help.strip()
    labels = (*metric.labels, "worker") if metric.scope is Scope.WORKER else metric.labels
    assert len(set(labels)) == len(labels)
    assert all(re.fullmatch("[a-z]+", label) for label in labels)
    assert "le" not in labels


@pytest.mark.parametrize("metric", METRICS, ids=IDS)
def test_histograms_and_they_alone_have_buckets(metric: Metric) -> None:
    assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets))
    if metric.kind is Kind.HISTOGRAM:
        assert metric.name.endswith(UNITS)


def test_names_are_told_once() -> None:
    assert len(set(IDS)) == len(IDS)


def test_the_page_of_the_docs_is_up_to_date() -> None:
    page = Path(__file__).parents[3] / "docs/metrics.md"
    text = page.read_text()
    assert reference.with_tables(text) == text, (
        "run python -m octavo.cluster.metrics.reference docs/metrics.md"
    )


def test_vllms_names_are_mapped_to_ours() -> None:
    names = set(IDS)
    for theirs, ours in reference.VLLM.items():
        assert theirs.startswith(("vllm:", "http_"))
        for name in re.findall(r"octavo_\w+", ours):
            assert re.sub("_(bucket|sum|count)$", "", name) in names, f"{theirs}: {name}"
