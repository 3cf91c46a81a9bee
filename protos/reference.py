"""Writes docs/protos.md from the `.proto` files, whose comments say what each field is.

python -m octavo.protos.reference > docs/protos.md
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from octavo.protos.generate import IMPORT_PREFIX, PROTO_FOLDER, proto_names

_HEAD = """# Messages

What coordinator, workers and ingresses say to each other, and what a recording holds. Made from `protos/*.proto` by
`python -m octavo.protos.reference`; a test keeps it true. Token ids, block tables and rows travel as little-endian
int32 in `bytes` fields, whose shape stands in brackets.
"""
_TYPES = {number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()}
_MESSAGE, _SERVICE, _ENUM, _FIELD, _METHOD, _VALUE = 4, 6, 5, 2, 2, 2
"""Field numbers of descriptor.proto, of which paths into a file are made."""


def page() -> str:
    """The page, Markdown. Needs grpcio-tools, as `generate.py` does."""
    return "\n".join([_HEAD, *(line for file in _files() for line in _file(file))])


def _files() -> list[FileDescriptorProto]:
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "all"
        status = protoc.main(
            [
                "protoc",
                f"-I{IMPORT_PREFIX}={PROTO_FOLDER}",
                "--include_source_info",
                f"--descriptor_set_out={out}",
                *(f"{IMPORT_PREFIX}/{name}.proto" for name in proto_names()),
            ]
        )
        if status != 0:
            raise RuntimeError(f"protoc ended with status {status}")
        return list(FileDescriptorSet.FromString(out.read_bytes()).file)


def _file(file: FileDescriptorProto) -> Iterator[str]:
    said = {
        tuple(place.path): " ".join(place.leading_comments.split())
        for place in file.source_code_info.location
        if place.leading_comments
    }
    name = file.name.rsplit("/", 1)[1]
    yield f"## {name}\n"
    for number, service in enumerate(file.service):
        yield f"### {service.name}\n\n{said.get((_SERVICE, number), '')}\n"
        yield "| call | takes | gives | |\n|---|---|---|---|"
        for at, method in enumerate(service.method):
            takes = ("stream of " if method.client_streaming else "") + _short(method.input_type)
            gives = ("stream of " if method.server_streaming else "") + _short(method.output_type)
            yield f"| `{method.name}` | {takes} | {gives} | {said.get((_SERVICE, number, _METHOD, at), '')} |"
        yield ""
    for number, enum in enumerate(file.enum_type):
        yield f"### {enum.name}\n\n{said.get((_ENUM, number), '')}\n\n| value | |\n|---|---|"
        for at, value in enumerate(enum.value):
            yield f"| `{value.name}` | {said.get((_ENUM, number, _VALUE, at), '')} |"
        yield ""
    for number, message in enumerate(file.message_type):
        yield from _message(message, (_MESSAGE, number), said)


def _message(
    message: DescriptorProto, path: tuple[int, ...], said: dict[tuple[int, ...], str]
) -> Iterator[str]:
    yield f"### {message.name}\n\n{said.get(path, '')}\n"
    if not message.field:
        return
    yield "| field | type | |\n|---|---|---|"
    for at, field in enumerate(message.field):
        text = said.get((*path, _FIELD, at), "").replace("|", "\\|")
        yield f"| `{field.name}` | {_type(field, message)} | {text} |"
    yield ""


def _type(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    for nested in message.nested_type:
        if nested.options.map_entry and field.type_name.endswith(f".{nested.name}"):
            key, value = nested.field
            return f"map of {_TYPES[key.type]} to {_type(value, nested)}"
    plain = _short(field.type_name) if field.type_name else _TYPES[field.type]
    return f"list of {plain}" if field.label == FieldDescriptorProto.LABEL_REPEATED else plain


def _short(type_name: str) -> str:
    return type_name.rsplit(".", 1)[1]


if __name__ == "__main__":
    sys.stdout.write(page())
