"""Progress on a terminal and elsewhere."""

from __future__ import annotations

import io

from octavo.cluster.progress import PLAIN_INTERVAL_SECONDS, progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_a_line_now_and_then_and_at_the_end():
    out = io.StringIO()
    now = [0.0]
    with progress_bar("work", 10, out=out, clock=lambda: now[0]) as bar:
        for _ in range(10):
            now[0] += PLAIN_INTERVAL_SECONDS / 4
            bar.advance(tokens=3)
    lines = out.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "work: 4/10 requests (40 %)",
        "work: 8/10 requests (80 %)",
        "work: 10/10 requests (100 %)",
    ]
    assert lines[0].endswith("2 tok/s")


def test_a_resumed_bar_starts_where_it_was():
    out = io.StringIO()
    with progress_bar("work", 10, done=9, out=out) as bar:
        bar.note("resuming")
        bar.advance()
    assert out.getvalue().startswith("resuming\nwork: 10/10")


def test_on_a_terminal_a_bar_is_drawn():
    out = Terminal()
    with progress_bar("work", 2, out=out) as bar:
        bar.advance(tokens=5)
        bar.note("half")
        bar.advance()
    assert "work" in out.getvalue()
    assert "half" in out.getvalue()


def test_disabled_only_counts():
    out = io.StringIO()
    with progress_bar("work", 2, enabled=False, out=out) as bar:
        bar.advance(2, tokens=7)
        bar.note("nothing")
    assert (bar.done, bar.tokens, out.getvalue()) == (2, 7, "")
