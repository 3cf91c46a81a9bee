"""Where options come from: flags over the environment over a file over defaults.

Owns precedence, the reading of a YAML file and of `OCTAVO_...` variables, and telling where a wrong value was found.
What the options are is `ServiceConfig`'s.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from octavo.cluster.service_config import ServiceConfig, did_you_mean, names_of, noun_of
from octavo.protos.errors import ConfigError
from octavo.protos.interface import BIND_ADDRESS_VARIABLE, NODE_ADDRESS_VARIABLE

CONFIG_VARIABLE = "OCTAVO_CONFIG"
FILE_BYTES_MAX = 1_000_000


def load_config(
    flags: Mapping[str, Any] | None = None,
    *,
    file: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> ServiceConfig:
    """`flags`: by option, those that were given. `file`: None for the one that OCTAVO_CONFIG names, if any.

    Raises `ConfigError` that names option, value, limit and where the value is from.
    """
    environment = os.environ if environment is None else environment
    file = file or environment.get(CONFIG_VARIABLE) or None
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for found, source in (
        ({} if file is None else _from_file(Path(file)), f"in {file}"),
        (_from_environment(environment), "in the environment"),
        (dict(flags or {}), "on the command line"),
    ):
        values |= found
        sources |= {name: _place(name, source) for name in found}
    try:
        return ServiceConfig(**values)
    except ConfigError as error:
        source = sources.get(error.param or "", "")
        raise ConfigError(
            f"{error.message} ({source})" if source else error.message, param=error.param
        ) from None


def misspelt_variables(environment: Mapping[str, str]) -> list[str]:
    """A sentence for each variable that nearly names an option: such a one has no effect."""
    known = {variable for _, variable in _names().values()}
    known |= {CONFIG_VARIABLE, NODE_ADDRESS_VARIABLE, BIND_ADDRESS_VARIABLE}
    unknown = [name for name in environment if name.startswith("OCTAVO_") and name not in known]
    near = ((name, did_you_mean(name, known, cutoff=0.85)) for name in sorted(unknown))
    return [f"{name} in the environment is no option{hint}" for name, hint in near if hint]


def _names() -> dict[str, tuple[str, str]]:
    """Option -> (flag, variable)."""
    return {name: names_of(name, field) for name, field in ServiceConfig.model_fields.items()}


def _place(name: str, source: str) -> str:
    """Where one value is from, as precisely as can be said."""
    if name not in ServiceConfig.model_fields:
        return source
    flag, variable = _names()[name]
    if source == "in the environment":
        return f"from {variable}"
    return f"from {flag}" if source == "on the command line" else f"from {name} {source}"


def _from_file(path: Path) -> dict[str, Any]:
    """Raises `ConfigError`."""
    import yaml

    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ConfigError(f"{path} is larger than {FILE_BYTES_MAX} bytes", param="config")
        loaded = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"cannot read {path}: {problem}", param="config") from problem
    except yaml.YAMLError as problem:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(problem).split())}", param="config") from problem
    if loaded is None:
        return {}
    if not isinstance(loaded, dict) or not all(isinstance(name, str) for name in loaded):
        raise ConfigError(f"{path} must hold `option: value` lines", param="config")
    return loaded


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Raises `ConfigError`."""
    found: dict[str, Any] = {}
    for name, field in ServiceConfig.model_fields.items():
        _, variable = names_of(name, field)
        text = environment.get(variable)
        if text is None:
            continue
        if field.annotation == tuple[str, ...]:
            found[name] = tuple(part.strip() for part in text.split(",") if part.strip())
            continue
        try:
            kind: Any = field.annotation
            found[name] = TypeAdapter(kind).validate_strings(text)
        except ValidationError as problem:
            wanted = noun_of(problem.errors(include_url=False)[0]["type"])
            raise ConfigError(
                f"{name} must be {wanted}, got {text!r:.100} (from {variable})",
                param=name,
            ) from None
    return found
