"""A page that holds all runs of one `octavo simulate`: the table, and how waiting and pauses are distributed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from octavo.cluster.simulator.fleet import RunRecord, quantile
from octavo.cluster.simulator.plots import lines
from octavo.cluster.simulator.report import SHOWN, Summary, rows

POINTS = 100
"""Of a distribution's curve."""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body{{font:14px sans-serif;margin:2em;max-width:80em}}table{{border-collapse:collapse}}
th,td{{padding:.25em .8em;text-align:right;border-bottom:1px solid #ddd}}
th:first-child,td:first-child{{text-align:left}}
</style></head><body><h1>{title}</h1><p>{lead}</p>
<table>{table}</table>
{plots}
</body></html>
"""


@dataclass(frozen=True, slots=True)
class Curves:
    """Of one run: (seconds, share of all that are no longer), for time to first token and mean time between tokens."""

    ttft: list[tuple[float, float]]
    itl: list[tuple[float, float]]

    @classmethod
    def of(cls, record: RunRecord) -> Curves:
        shares = [number / POINTS for number in range(1, POINTS + 1)]
        ttft = [one.ttft_seconds for one in record.outcomes]
        itl = [one.itl_seconds for one in record.outcomes if one.num_output_tokens > 1]
        return cls(
            [(quantile(ttft, share), share) for share in shares],
            [(quantile(itl, share), share) for share in shares],
        )


def page(summaries: Sequence[Summary], curves: Sequence[Curves]) -> str:
    """One self-contained HTML document."""
    first = summaries[0]
    how = "computed from data sheets" if first.device_source == "roofline" else "measured"
    lead = (
        f"{first.requests} requests on workers of {first.device}; speeds {how}. Every decision is the production "
        "scheduler's and router's; only the time of a step is made up."
    )
    table = []
    for (_, heading, _), *cells in zip(SHOWN, *rows(summaries), strict=True):
        row = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        table.append(f"<tr><td>{escape(heading)}</td>{row}</tr>")
    names = [
        f"{one.workers} x {one.policy}, block {one.block_size}, budget {one.max_num_batched_tokens}"
        for one in summaries
    ]
    plots = [
        lines(
            dict(zip(names, found, strict=True)), title=title, x_label="seconds", y_label="share of requests"
        )
        for title, found in (
            ("Time to first token", [one.ttft for one in curves]),
            ("Mean time between tokens", [one.itl for one in curves]),
        )
    ]
    return _PAGE.format(
        title=escape(f"Simulation of {first.trace}"),
        lead=escape(lead),
        table="\n".join(table),
        plots="\n".join(f"<p>{plot}</p>" for plot in plots),
    )
