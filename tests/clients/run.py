"""Real clients against a running server, each in an environment of its own.

    python -m tests.clients.run all
    python -m tests.clients.run litellm llm --url http://127.0.0.1:8000
    OCTAVO_GSM8K=gsm8k_test.jsonl python -m tests.clients.run lm-eval

Makes each client's environment on first use, in the folder `clients` of the cache ($OCTAVO_CACHE or ~/.cache/octavo;
guidellm brings torch: gigabytes), starts `octavo serve` with the default model unless --url names a server, and runs
`use_NAME` there. Prints a table of client, outcome and seconds, and ends with 1 when one failed. The last
outcomes are in docs/clients.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from octavo.worker.model_cache import cache_root

HERE = Path(__file__).resolve().parent
CLIENT_SECONDS_MAX = 600


@dataclass(frozen=True)
class Client:
    """`packages`: what pip, or for a .mjs script npm, installs."""

    script: str
    packages: tuple[str, ...] = ()


CLIENTS = {
    "openai": Client("use_openai.py", ("openai",)),
    "curl": Client("use_curl.py"),
    "npm-openai": Client("use_npm_openai.mjs", ("openai",)),
    "langchain-openai": Client("use_langchain_openai.py", ("langchain-openai",)),
    "litellm": Client("use_litellm.py", ("litellm",)),
    "llm": Client("use_llm.py", ("llm",)),
    "lm-eval": Client("use_lm_eval.py", ("lm-eval[api]",)),
    "guidellm": Client("use_guidellm.py", ("guidellm",)),
}


def environment(name: str, client: Client) -> list[str]:
    """The command that runs the client's script in its own environment, which is made if need be."""
    root = cache_root() / "clients" / name
    done = root / ".installed"
    if client.script.endswith(".mjs"):
        if not done.exists():
            root.mkdir(parents=True, exist_ok=True)
            subprocess.run(
                ["npm", "install", "--no-audit", "--no-fund", *client.packages], cwd=root, check=True
            )
            done.touch()
        # Modules are sought beside the script, so it must lie beside them.
        script = root / client.script
        script.write_text((HERE / client.script).read_text())
        return ["node", str(script)]
    python = root / "bin" / "python"
    if not done.exists():
        venv.create(root, with_pip=True)
        if client.packages:
            subprocess.run([python, "-m", "pip", "install", "-q", *client.packages], check=True)
        done.touch()
    return [str(python), "-P", str(HERE / client.script)]


@contextlib.contextmanager
def served(url: str | None) -> Iterator[str]:
    """The address of a server that is ready: the one at `url`, or one that is started and ended."""
    if url is not None:
        yield url.rstrip("/").removesuffix("/v1")
        return
    code = "from octavo.cluster.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("octavo serve did not start")
        yield json.loads(line)["url"]
    finally:
        process.terminate()
        process.wait(60)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=[*CLIENTS, "all"], metavar=f"{{{','.join(CLIENTS)},all}}")
    parser.add_argument("--url", help="a running server, in place of a new one")
    args = parser.parse_args()
    names = list(CLIENTS) if "all" in args.names else args.names
    commands = {name: environment(name, CLIENTS[name]) for name in names}
    failed = 0
    with served(args.url) as url:
        card = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]
        from octavo.worker.loader import resolve_model

        variables = {
            "OCTAVO_URL": url,
            "OCTAVO_MODEL": card["id"],
            "OCTAVO_TOKENIZER": str(resolve_model().folder),
        }
        # A client must not meet our folders as modules, nor this process's proxies.
        clean = {
            key: value
            for key, value in os.environ.items()
            if key != "PYTHONPATH" and "proxy" not in key.lower()
        }
        print("| client | outcome | seconds |\n|---|---|---|", flush=True)
        for name, command in commands.items():
            began = time.monotonic()
            try:
                done = subprocess.run(
                    command,
                    env={**clean, **variables},
                    cwd=cache_root(),
                    stdout=subprocess.PIPE,
                    text=True,
                    timeout=CLIENT_SECONDS_MAX,
                    check=False,
                )
                lines, code = done.stdout.strip().splitlines(), done.returncode
            except subprocess.TimeoutExpired:
                lines, code = [f"no end within {CLIENT_SECONDS_MAX} s"], 1
            told = lines[-1] if lines else "no output"
            print(
                f"| {name} | {'FAILED: ' if code else ''}{told} | {time.monotonic() - began:.0f} |",
                flush=True,
            )
            failed += code != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
