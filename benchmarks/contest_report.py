"""What the runs of a contest say: figures by contestant, ratios against targets, agreement of greedy answers.

Medians over the rounds, with the range seen. A ratio is one of medians and says how many times better ours is: the
peer's seconds over ours, or our tokens a second over the peer's. A figure during which other processes used much of the
machine counts only where a contestant has no other for that workload, and is then marked "~".
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agreement import agreement

Run = dict[str, Any]
OTHERS_CORES_MAX = 0.1
"""Of the machine, used by other processes during a workload; above, the figure is one of a busy machine."""


@dataclass(frozen=True)
class Metric:
    title: str
    workload: str
    figure: str
    more_is_better: bool = False


W1 = Metric("W1, s", "w1", "seconds")
W2_COLD = Metric("W2 cold, s", "w2 cold", "seconds")
W2_AGAIN = Metric("W2 again, s", "w2 again", "seconds")
W2_NEW_TAILS = Metric("W2 new tails, s", "w2 new tails", "seconds")
W3_GAP_P50 = Metric("W3 gap p50, ms", "w3", "gap_ms_p50")
W3_GAP_MAX = Metric("W3 largest gap, s", "w3", "gap_seconds_max")
W3_LONG = Metric("W3 long prompt's first token, s", "w3", "long_first_token_seconds")
W4 = Metric("W4, s", "w4", "seconds")
W5 = Metric("W5, tokens/s", "w5", "output_tokens_per_second", more_is_better=True)
METRICS = (W1, W2_COLD, W2_AGAIN, W2_NEW_TAILS, W3_GAP_P50, W3_GAP_MAX, W3_LONG, W4, W5)

DEFAULTS = ("vllm", "vllm zen", "llama.cpp f32", "hf continuous", "hf static")
"""Exact peers as they come."""
TUNED = (*DEFAULTS, "vllm budget 256", "vllm zen budget 256")


@dataclass(frozen=True)
class Target:
    """`ours` is at least `factor` times as good as the best of `peers` that ran."""

    ours: str
    metric: Metric
    peers: tuple[str, ...]
    factor: float


TARGETS = (
    Target("octavo", W1, DEFAULTS, 1.25),
    Target("octavo", W2_AGAIN, DEFAULTS, 1.4),
    Target("octavo", W2_NEW_TAILS, DEFAULTS, 1.4),
    Target("octavo", W3_GAP_MAX, DEFAULTS, 4.0),
    Target("octavo", W3_GAP_MAX, TUNED, 1.0),
    Target("octavo", W3_LONG, TUNED, 1 / 1.3),
    Target("octavo", W4, DEFAULTS, 1.5),
    Target("octavo", W5, DEFAULTS, 1.0),
    Target("octavo int8", W1, ("vllm", "vllm zen"), 2.0),
    Target("octavo int8", W1, ("llama.cpp q4_1",), 3.0),
    Target("octavo int8", W5, ("llama.cpp q4_1",), 0.7),
)


def show(runs: list[Run], model: Path) -> None:
    """Print all tables, as Markdown. `model` is the folder with the tokenizer."""
    names = list(dict.fromkeys(run["contestant"] for run in runs))
    print(
        "\n".join(
            [*figures_table(runs, names), "", *targets_table(runs), "", *agreement_table(runs, names, model)]
        )
    )


def is_quiet(figures: dict[str, float]) -> bool:
    """Whether the rest of the machine left this workload in peace."""
    return figures["others"] <= OTHERS_CORES_MAX


def values(runs: Iterable[Run], name: str, metric: Metric) -> list[float]:
    """One a run: of the undisturbed ones, if there are any."""
    found = _of_workload(runs, name, metric)
    quiet = [figures for figures in found if is_quiet(figures)]
    return [figures[metric.figure] for figures in quiet or found]


def _of_workload(runs: Iterable[Run], name: str, metric: Metric) -> list[dict[str, float]]:
    rows = [run["figures"] for run in runs if run["contestant"] == name]
    return [figures[metric.workload] for figures in rows if metric.workload in figures]


def figures_table(runs: list[Run], names: list[str]) -> list[str]:
    lines = _head("", *(metric.title for metric in METRICS), "start, s")
    for name in names:
        starts = {run["round"]: run["start_seconds"] for run in runs if run["contestant"] == name}
        cells = [_cell(runs, name, metric) for metric in METRICS]
        lines.append(_row(name, *cells, _median_and_range(list(starts.values()))))
    return lines


def targets_table(runs: list[Run]) -> list[str]:
    lines = _head("ours", "figure", "best peer", "times as good", "target", "")
    for target in TARGETS:
        ours = values(runs, target.ours, target.metric)
        theirs = {peer: found for peer in target.peers if (found := values(runs, peer, target.metric))}
        if not ours or not theirs:
            continue
        ratios = {peer: _ratio(target.metric, ours, found) for peer, found in theirs.items()}
        best = min(ratios, key=lambda peer: ratios[peer])
        verdict = "met" if ratios[best] >= target.factor else "missed"
        if any(_disturbed(runs, name, target.metric) for name in (target.ours, best)):
            verdict = f"~{verdict}"
        lines.append(
            _row(
                target.ours, target.metric.title, best, f"{ratios[best]:.2f}", f"{target.factor:.2f}", verdict
            )
        )
    return lines


def agreement_table(runs: list[Run], names: list[str], model: Path) -> list[str]:
    """Greedy answers of each contestant beside Octavo's in float32."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def decode(ids: list[int]) -> str:
        text: str = tokenizer.decode(ids, skip_special_tokens=False)
        return text

    answers = {name: _all_answers(runs, name) for name in names}
    reference = answers.pop("octavo", {})
    lines = _head("greedy answers of", "equal to octavo's", "share before the first difference")
    for name, made in answers.items():
        if made.keys() & reference.keys():
            facts = agreement(reference, made, decode)
            lines.append(_row(name, facts["equal_answers"], f"{facts['share_before_difference']:.1%}"))
    return lines


def _all_answers(runs: list[Run], name: str) -> dict[str, list[Any]]:
    return {
        f"{key}/{run['round']}": tokens
        for run in runs
        if run["contestant"] == name
        for key, tokens in run["answers"].items()
    }


def _ratio(metric: Metric, ours: list[float], theirs: list[float]) -> float:
    a, b = statistics.median(ours), statistics.median(theirs)
    return a / b if metric.more_is_better else b / a


def _cell(runs: list[Run], name: str, metric: Metric) -> str:
    return ("~" if _disturbed(runs, name, metric) else "") + _median_and_range(values(runs, name, metric))


def _disturbed(runs: list[Run], name: str, metric: Metric) -> bool:
    found = _of_workload(runs, name, metric)
    return bool(found) and not any(map(is_quiet, found))


def _median_and_range(found: list[float]) -> str:
    if not found:
        return "-"
    median = f"{statistics.median(found):.3g}"
    return median if len(found) == 1 else f"{median} ({min(found):.3g} to {max(found):.3g})"


def _head(*cells: str) -> list[str]:
    return [_row(*cells), "|" + "---|" * len(cells)]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"
