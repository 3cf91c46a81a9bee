"""The curl lines of the documentation, executed as they are written. Run by `run.py`; needs OCTAVO_URL.

Only the server's address is replaced, since 8000 may be taken. A line whose id is made up (a fork of a request that ran
when the page was written) must be answered with 404 and OpenAI's error object.
"""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_FENCED = re.compile(r"^```[a-z]*\n(.*?)^```", re.S | re.M)
_ADDRESS = re.compile(r"(?:http://)?(?:localhost|127\.0\.0\.1):8000")


def curl_lines(page: Path) -> list[str]:
    """Every curl command in the fenced blocks of a page, continued lines joined."""
    blocks = _FENCED.findall(page.read_text("utf-8"))
    commands = (command for block in blocks for command in block.replace("\\\n", " ").splitlines())
    return [command.strip() for command in commands if command.startswith("curl ")]


def execute(command: str, url: str) -> str:
    """The whole answer. Raises where curl fails or the server says that something is wrong."""
    words = shlex.split(_ADDRESS.sub(url, command), comments=True)
    done = subprocess.run(
        [*words, "--max-time", "120", "--silent", "--show-error", "--write-out", "\n%{http_code}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    answer, _, status = done.stdout.rpartition("\n")
    wanted = "404" if "..." in command else "200"
    assert status == wanted, f"{command}: HTTP {status}: {answer}"
    if wanted == "404":
        assert json.loads(answer)["error"]["message"]
    elif '"stream": true' in command:
        assert answer.rstrip().endswith("data: [DONE]"), answer
    return answer


def main() -> int:
    found = [(page, command) for page in PAGES for command in curl_lines(page)]
    assert len(found) >= 5, "the documentation has lost its curl lines"
    for page, command in found:
        assert execute(command, os.environ["OCTAVO_URL"]), f"{page}: {command}"
    version = subprocess.run(
        ["curl", "--version"], capture_output=True, text=True, check=True
    ).stdout.split()[1]
    print(f"curl {version}: {len(found)} lines of the documentation as written")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
