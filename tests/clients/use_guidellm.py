"""`guidellm`: a short benchmark with synthetic prompts, chat and text completions. Run by `run.py`.

Needs OCTAVO_URL, and OCTAVO_TOKENIZER: the folder of a tokenizer, since no hub is asked.
"""

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

REQUESTS = 8


def benchmark(request_format: str, folder: Path) -> dict[str, int]:
    """Requests by how they ended. Raises where guidellm ends with an error."""
    out = folder / "out.json"
    target = f"kind=openai_http,target={os.environ['OCTAVO_URL']},request_format={request_format}"
    command = [
        *(sys.executable, "-m", "guidellm", "run", "--disable-console-interactive"),
        *("--backend", f"{target},model={os.environ['OCTAVO_MODEL']}"),
        *("--profile", "kind=concurrent,streams=4"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--data", "kind=synthetic_text,prompt_tokens=48,output_tokens=16"),
        *("--tokenizer", f"kind=huggingface_auto,model={os.environ['OCTAVO_TOKENIZER']}"),
        *("--output", f"kind=json,path={out}"),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "GUIDELLM__DEFAULT_RESULTS_DIR": str(folder)}
    subprocess.run(command, env=environment, cwd=folder, check=True, stdout=sys.stderr)
    (one,) = json.loads(out.read_text())["benchmarks"]
    totals = one["metrics"]["request_totals"]
    tokens = one["metrics"]["output_token_count"]["successful"]["mean"]
    assert tokens == 16, f"{tokens} tokens an answer"
    return totals


with tempfile.TemporaryDirectory() as name:
    for request_format in ("/v1/chat/completions", "/v1/completions"):
        totals = benchmark(request_format, Path(name))
        assert totals["successful"] == REQUESTS, totals
        assert not totals["errored"], totals
print(
    f"guidellm {version('guidellm')}: {REQUESTS} chats and {REQUESTS} text completions of 16 tokens, none failed"
)
