"""Who may give orders to Ray: only whoever has the cluster's token.

Whoever reaches Ray's ports can run code as us, and what passes between its processes is pickle. Ray asks for a token
where `RAY_AUTH_MODE` is "token", and keeps one for each user in a file, by which later commands of the same user find
in. It makes that file readable for everybody on the machine, so it is made here before.
"""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

from octavo.protos.errors import StartupError

logger = logging.getLogger(__name__)

MODE_VARIABLE = "RAY_AUTH_MODE"
TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def token_path() -> Path:
    """Where Ray looks for the token of this user."""
    return Path.home() / ".ray" / "auth_token"


def require_token() -> None:
    """Call before a local Ray is started: it, and all that it starts, asks for a token. A mode that the environment
    sets is left alone. Raises `StartupError` when no token can be kept."""
    if os.environ.setdefault(MODE_VARIABLE, "token") != "token":
        logger.warning("%s=%s: Ray takes orders from anybody", MODE_VARIABLE, os.environ[MODE_VARIABLE])
        return
    if any(os.environ.get(name) for name in TOKEN_VARIABLES):
        return
    path = token_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
        except FileExistsError:
            if path.stat().st_mode & 0o077 and path.stat().st_uid == os.getuid():
                path.chmod(0o600)
    except OSError as error:
        raise StartupError(f"Ray's token cannot be kept in {path}: {error.strerror}") from error
