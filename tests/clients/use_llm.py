"""The `llm` command with a custom endpoint, as its documentation has it. Run by `run.py`; needs OCTAVO_URL."""

import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

MODEL = """
- model_id: octavo
  model_name: {model}
  api_base: {url}/v1
"""

with tempfile.TemporaryDirectory() as folder:
    described = MODEL.format(model=os.environ["OCTAVO_MODEL"], url=os.environ["OCTAVO_URL"])
    (Path(folder) / "extra-openai-models.yaml").write_text(described)
    environment = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}
    command = Path(sys.executable).parent / "llm"

    def llm(*arguments: str) -> str:
        asked = [command, *arguments, "-o", "temperature", "0", "-o", "max_tokens", "16"]
        return subprocess.run(asked, env=environment, check=True, capture_output=True, text=True).stdout

    streamed = llm("-m", "octavo", "Name the capital of France.")
    assert "Paris" in streamed
    assert llm("-m", "octavo", "--no-stream", "Name the capital of France.").strip() == streamed.strip()
    # A conversation goes on from what was logged.
    assert llm("-c", "Say it again.")
    assert llm("-m", "octavo", "-s", "You are brief.", "Hi").strip()
print(f"llm {version('llm')}: prompts streamed and not, a system prompt, a conversation")
