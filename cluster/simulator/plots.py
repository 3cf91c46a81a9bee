"""Small plots as SVG text, so that a report needs no plotting library."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, log10

COLOURS = ("#1f6fb4", "#e07b1a", "#3a9a4a", "#b03a6a", "#7a5bb0", "#666666")
INK, GRID = "#222222", "#dddddd"
LABELLED_GROUPS_MAX = 6


def _ticks(most: float) -> list[float]:
    """Round numbers from 0 on, the last one at least `most`; between 4 and 9 of them."""
    if most <= 0:
        return [0.0, 1.0]
    size = 10.0 ** floor(log10(most))
    step = next(size * share for share in (0.2, 0.5, 1.0, 2.0) if most / (size * share) <= 8)
    # Rounded, or 0.1 * 3 would be written out.
    return [round(step * index, 12) for index in range(ceil(most / step - 1e-9) + 1)]


def _svg(width: float, height: float, parts: list[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, turn: bool = False) -> str:
    turned = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{INK}"{turned}>'
        f"{escape(text)}</text>"
    )


def _legend(names: Sequence[str], x: float, y: float) -> list[str]:
    parts = []
    for index, name in enumerate(names):
        parts.append(
            f'<rect x="{x}" y="{y - 10}" width="10" height="10" fill="{COLOURS[index % len(COLOURS)]}"/>'
        )
        parts.append(_text(x + 15, y, name))
        x += 30 + 7.2 * len(name)
    return parts


def above(*plots: str) -> str:
    """One picture of several, the first on top."""
    sizes = [tuple(map(float, re.findall(r'(?:width|height)="([\d.]+)"', plot)[:2])) for plot in plots]
    parts, y = [], 0.0
    for plot, (_, height) in zip(plots, sizes, strict=True):
        parts.append(plot.replace("<svg ", f'<svg y="{y:g}" ', 1).rstrip())
        y += height
    return _svg(max(width for width, _ in sizes), y, parts)


def bars(groups: Mapping[str, Mapping[str, float]], *, title: str, limit: float) -> str:
    """Horizontal bars: one group a key, one bar a name in it; what is longer than `limit` is cut and says its value,
    as all do where they are few."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    left, bar, gap, width = 230, 9, 9, 520
    parts = [_text(10, 22, title, size=15), *_legend(names, 10, 44)]
    top = 62.0
    bottom = top + sum(len(group) * bar + gap for group in groups.values())
    for tick in _ticks(limit):
        if tick > limit:
            break
        x = left + width * tick / limit
        parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom:.1f}" stroke="{GRID}"/>')
        parts.append(_text(x, bottom + 14, f"{tick:g}", anchor="middle"))
    y = top + gap / 2
    for key, group in groups.items():
        parts.append(_text(left - 8, y + len(group) * bar / 2 + 4, key, anchor="end", size=11))
        for name, value in group.items():
            length = width * min(value, limit) / limit
            colour = COLOURS[names.index(name) % len(COLOURS)]
            parts.append(
                f'<rect x="{left}" y="{y:.1f}" width="{length:.1f}" height="{bar - 1}" fill="{colour}"/>'
            )
            if value > limit or len(groups) <= LABELLED_GROUPS_MAX:
                parts.append(
                    _text(
                        left + length + 4,
                        y + bar - 1,
                        f"{value:.0f}" if value >= 100 else f"{value:.3g}",
                        size=9,
                    )
                )
            y += bar
        y += gap
    return _svg(left + width + 60, bottom + 28, parts)


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]], *, title: str, x_label: str, y_label: str
) -> str:
    """One line a name through its (x, y) points; axes start at 0."""
    width, height, left, top = 560, 300, 70, 70
    points = [point for line in series.values() for point in line]
    x_ticks = _ticks(max((x for x, _ in points), default=1.0))
    y_ticks = _ticks(max((y for _, y in points), default=1.0))
    x_max, y_max = x_ticks[-1], y_ticks[-1]
    parts = [_text(10, 22, title, size=15), *_legend(list(series), 10, 46)]
    for tick in y_ticks:
        y = top + height - height * tick / y_max
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}" stroke="{GRID}"/>')
        parts.append(_text(left - 6, y + 4, f"{tick:g}", anchor="end", size=11))
    for tick in x_ticks:
        x = left + width * tick / x_max
        parts.append(_text(x, top + height + 16, f"{tick:g}", anchor="middle", size=11))
    for index, line in enumerate(series.values()):
        path = " ".join(
            f"{left + width * x / x_max:.1f},{top + height - height * y / y_max:.1f}" for x, y in line
        )
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
    parts.append(_text(left + width / 2, top + height + 36, x_label, anchor="middle"))
    parts.append(_text(18, top + height / 2, y_label, anchor="middle", turn=True))
    return _svg(left + width + 40, top + height + 50, parts)
