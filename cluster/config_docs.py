"""Writes docs/configuration.md from the options themselves.

python -m octavo.cluster.config_docs > docs/configuration.md
"""

from __future__ import annotations

import sys
from typing import Any, get_args

from octavo.cluster.config_sources import CONFIG_VARIABLE
from octavo.cluster.service_config import ServiceConfig, group_of, names_of

_KINDS = {
    int: "integer",
    float: "number",
    bool: "true or false",
    str: "text",
    tuple[str, ...]: "list of texts",
}

_HEAD = f"""# Configuration

Every option of `octavo serve`. This page is made by `python -m octavo.cluster.config_docs`; a test keeps it true.

An option may be given in three places. The first that has it counts:

1. a flag: `octavo serve --workers 2`;
2. a variable of the environment: `OCTAVO_NUM_WORKERS=2`; lists are separated by commas;
3. a YAML file, named by `--config FILE` or `{CONFIG_VARIABLE}`:

```yaml
num_workers: 2
gpu_memory_utilization: 0.9
cors_origins: ["https://example.org"]
```

A file with an unknown option, and a value that cannot be, end the start with one line that names option, value, limit
and where the value is from. The same names are the arguments of `ServiceConfig` in Python. `octavo doctor` checks what
a configuration needs of this machine.

Other variables: `OCTAVO_CACHE` is the folder of converted models and of `jobs_dir`; `OCTAVO_URL` and `OCTAVO_API_KEY`
are server and key of the commands that are clients.

## Advice

What is allowed and unwise is told with reason and remedy in the log of `octavo serve`, by `octavo status`, and in
`advice` of `/health`, for as long as it holds:

| code | when |
|---|---|
| `block_size` | `block_size` is neither 16 nor 32 |
| `gpu_memory_utilization` | it is above 0.95 |
| `prefix_cache` | it is off, and 16 prompts have begun with the same 64 tokens as an earlier one |
| `itl_target` | a step of `max_num_batched_tokens` is predicted to take longer, so the budget is cut all the time |
| `preemptions` | any request was preempted in the last minute |
"""


def page() -> str:
    """The whole page."""
    groups: dict[str, list[str]] = {}
    for name, field in ServiceConfig.model_fields.items():
        flag, variable = names_of(name, field)
        kind: Any = field.annotation
        optional = type(None) in get_args(kind)
        if optional:
            kind = get_args(kind)[0]
        flag = "the argument" if name == "model" else f"`{flag}`"
        if kind is bool:
            flag += f", `--no-{flag.strip('`-')}`"
        row = f"| `{name}` | {flag} | `{variable}` | {_KINDS[kind]} | {_default(field.default)} | {field.description} |"
        groups.setdefault(group_of(field), []).append(row)
    head = "| option | flag | variable | kind | default | meaning |\n|---|---|---|---|---|---|"
    return "\n".join(
        [_HEAD, *(f"## {group}\n\n{head}\n" + "\n".join(rows) + "\n" for group, rows in groups.items())]
    )


def _default(value: Any) -> str:
    if value is None:
        return "unset"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`" if value != () else "none"


if __name__ == "__main__":
    sys.stdout.write(page())
