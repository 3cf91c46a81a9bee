"""The light ones of the real clients, against the real model: `openai` for Python, and curl. `run.py` has all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.cluster.tokenizer import Tokenizer

from ..e2e.support import Background
from . import use_curl

pytestmark = pytest.mark.model
HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def background(default_model_dir, tmp_path_factory):
    from octavo.worker.build import build_executor
    from octavo.worker.config import WorkerConfig

    executor = build_executor(
        WorkerConfig(worker_id="worker-0", num_blocks=600, max_num_batched_tokens=256, max_num_seqs=32)
    )
    jobs_dir = str(tmp_path_factory.mktemp("jobs"))
    with Background(executor, Tokenizer(default_model_dir), jobs_dir=jobs_dir) as running:
        yield running


def test_openai_python(background):
    environment = {**os.environ, "OCTAVO_URL": background.system.url}
    command = [sys.executable, "-P", HERE / "use_openai.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert background.idle_stats()["blocks_used"] == 0


def test_curl_lines_of_the_documentation(background):
    for page in use_curl.PAGES:
        for command in use_curl.curl_lines(page):
            assert use_curl.execute(command, background.system.url), f"{page.name}: {command}"
