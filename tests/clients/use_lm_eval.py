"""`lm-eval` through local-completions: 20 items of GSM8K, generated, and scored by log-likelihood.

Run by `run.py`; needs OCTAVO_URL, and OCTAVO_GSM8K for the file of items. No hub is asked: the tokenizer is the
server's own, over HTTP.
"""

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
ITEMS = 20
items = Path(os.environ["OCTAVO_GSM8K"]).resolve()


def evaluate(task: str, folder: Path) -> dict[str, object]:
    """The results of one task. Raises where lm-eval ends with an error."""
    server = f"model={os.environ['OCTAVO_MODEL']},base_url={os.environ['OCTAVO_URL']}/v1/completions"
    command = [
        *(sys.executable, "-m", "lm_eval", "run", "--tasks", task, "--include_path", str(folder)),
        *("--model", "local-completions", "--limit", str(ITEMS)),
        *("--model_args", f"{server},num_concurrent=8,tokenizer_backend=remote,max_retries=1"),
        *("--output_path", str(folder / "out"), "--log_samples"),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "hf"), "OPENAI_API_KEY": "none"}
    environment = {**os.environ, **offline}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, stderr=sys.stderr)
    (samples,) = (folder / "out").rglob(f"samples_{task}_*.jsonl")
    assert len(samples.read_text().splitlines()) == ITEMS
    results = max((folder / "out").rglob("results_*.json"), key=lambda path: path.stat().st_mtime)
    return json.loads(results.read_text())["results"][task]


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    for task in ("gsm8k.yaml", "gsm8k_choice.yaml"):
        (folder / task).write_text((HERE / task).read_text().replace("FILE", str(items)))
    generated = evaluate("octavo_gsm8k", folder)
    scored = evaluate("octavo_gsm8k_choice", folder)
# The right answer is nearly always likelier than a million of anything.
assert scored["acc,none"] > 0.5, scored
print(
    f"lm-eval {version('lm-eval')}: {ITEMS} items generated (exact match {generated['exact_match,last-number']}), "
    f"{ITEMS} scored by log-likelihood (accuracy {scored['acc,none']})"
)
