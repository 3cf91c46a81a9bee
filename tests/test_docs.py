"""Pages are true: made ones are up to date, links lead somewhere, both READMEs tell the same, the site builds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from octavo.cluster.cli import reference as cli
from octavo.protos import reference as protos

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("README*.md")])
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def text_of(page: Path) -> str:
    """Without code, in which brackets mean other things."""
    return re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page.read_text(encoding="utf-8")))


def anchors_of(page: Path) -> set[str]:
    """As Python-Markdown's toc names headings."""
    headings = _HEADING.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))
    plain = (re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", one).strip().lower()) for one in plain}


@pytest.mark.parametrize(("name", "made"), [("cli.md", cli.page), ("protos.md", protos.page)])
def test_made_pages_are_up_to_date(name, made):
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == made(), (
        "make it again: its first lines say how"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in _LINK.findall(text_of(page)):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        if anchor and found.suffix == ".md":
            assert anchor in anchors_of(found), target


def test_every_page_is_in_the_navigation():
    def leaves(node):
        if isinstance(node, str):
            return [node]
        return [leaf for one in (node.values() if isinstance(node, dict) else node) for leaf in leaves(one)]

    told = leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert sorted(told) == sorted(str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md"))


def test_both_readmes_have_the_same_sections_code_and_links():
    english, chinese = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md")
    )
    levels = [re.findall(r"^(#+) ", _FENCE.sub("", text), re.MULTILINE) for text in (english, chinese)]
    assert levels[0] == levels[1]
    code = [[re.sub(r"#.*", "", block) for block in _FENCE.findall(text)] for text in (english, chinese)]
    commands = [[block for block in blocks if "│" not in block] for blocks in code]
    assert commands[0] == commands[1]
    other = {"README.md", "README.zh-CN.md"}
    links = [sorted(set(_LINK.findall(text)) - other) for text in (english, chinese)]
    assert links[0] == links[1]
    rows = [len(re.findall(r"^\|", text, re.MULTILINE)) for text in (english, chinese)]
    assert rows[0] == rows[1]


def test_the_site_builds(tmp_path):
    done = subprocess.run(
        [
            Path(sys.executable).parent / "mkdocs",
            "build",
            "--strict",
            "--quiet",
            "--site-dir",
            tmp_path / "site",
        ],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "concepts.html").read_text(encoding="utf-8")
    assert "images/block-table.svg" in page
    # A page that loads something from elsewhere tells others who reads it.
    assert not re.findall(r'(?:src|href)="https?://[^"]+\.(?:js|css|woff2?)"', page)
