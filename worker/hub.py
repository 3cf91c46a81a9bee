"""Fetches a model folder from a model hub. Owns which files are taken: safetensors, JSON and tokenizer files only."""

from __future__ import annotations

from pathlib import Path

from octavo.protos.errors import ModelLoadError

_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt", "*.model")
_ETAG_SECONDS = 10.0


def download(repo_id: str, *, with_code: bool) -> Path:
    """The local snapshot of `repo_id`, fetched if need be; Python files only `with_code`.

    Raises `ModelLoadError` when the hub does not know it, refuses it, or cannot be reached.
    """
    from huggingface_hub import snapshot_download

    patterns = [*_PATTERNS, "*.py"] if with_code else [*_PATTERNS]
    try:
        return Path(snapshot_download(repo_id, allow_patterns=patterns, etag_timeout=_ETAG_SECONDS))
    except Exception as error:  # the edge to a library with a dozen exception types of three HTTP stacks
        reason = next(
            (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
        )
        raise ModelLoadError(
            f"cannot fetch {repo_id!r} from the model hub, and no such folder exists here: {reason}"
        ) from error
