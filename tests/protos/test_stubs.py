"""The committed stubs are what the `.proto` files give, and the `.proto` files keep the house rules."""

import itertools
import re
from importlib import metadata

import pytest
from google.protobuf import descriptor

from octavo.protos import common_pb2, coordinator_pb2, generate, recording_pb2, worker_pb2

FILES = {
    module.DESCRIPTOR.name.rsplit("/", 1)[1]: module
    for module in (common_pb2, worker_pb2, coordinator_pb2, recording_pb2)
}


def test_stubs_are_up_to_date():
    stale = generate.drifted()
    assert not stale, (
        f"{stale} differ from what grpcio-tools {metadata.version('grpcio-tools')} makes of the .proto files; "
        "run `make protos` with the version in constraints.txt"
    )


def test_drift_is_noticed(tmp_path, monkeypatch):
    for path in generate.PROTO_FOLDER.glob("*.proto"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for path in generate.PROTO_FOLDER.glob("*_pb2*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(generate, "PROTO_FOLDER", tmp_path)
    assert generate.drifted() == []
    worker = tmp_path / "worker.proto"
    worker.write_text(worker.read_text().replace("uint64 finished_step_id = 1;", "uint64 last_step_id = 1;"))
    (tmp_path / "coordinator_pb2.py").unlink()
    (tmp_path / "left_over_pb2.py").write_text("")
    assert generate.drifted() == ["coordinator_pb2.py", "left_over_pb2.py", "worker_pb2.py", "worker_pb2.pyi"]


def test_every_proto_file_is_known_here():
    assert sorted(FILES) == [f"{name}.proto" for name in generate.proto_names()]


def test_check_writes_nothing_and_says_what_is_stale(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.proto").write_text('syntax = "proto3";\npackage octavo.a.v1;\nmessage A {}\n')
    monkeypatch.setattr(generate, "PROTO_FOLDER", tmp_path)
    assert generate.main(["--check"]) == 1
    assert "a_pb2.py" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.proto"]
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0


@pytest.mark.parametrize("name", FILES)
def test_packages_are_versioned(name):
    assert FILES[name].DESCRIPTOR.package == f"octavo.{name.removesuffix('.proto')}.v1"


@pytest.mark.parametrize("name", FILES)
def test_services_and_their_messages_are_named_after_the_call(name):
    for service in FILES[name].DESCRIPTOR.services_by_name.values():
        assert service.name.endswith("Service")
        for method in service.methods:
            assert method.input_type.name == f"{method.name}Request"
            assert method.output_type.name == f"{method.name}Response"


@pytest.mark.parametrize("name", FILES)
def test_enums_begin_with_unspecified(name):
    for enum in FILES[name].DESCRIPTOR.enum_types_by_name.values():
        prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper()
        assert enum.values[0].name == f"{prefix}_UNSPECIFIED"
        assert enum.values[0].number == 0
        assert all(value.name.startswith(f"{prefix}_") for value in enum.values)


@pytest.mark.parametrize("name", FILES)
def test_fields_are_snake_case_and_documented(name):
    lines = (generate.PROTO_FOLDER / name).read_text().splitlines()
    documented = {
        match.group(1)
        for before, line in itertools.pairwise(lines)
        if (match := re.search(r"(\w+)(?: = \d+;| \{.*)$", line)) and before.strip().startswith("//")
    }

    def walk(message: descriptor.Descriptor):
        if message.GetOptions().map_entry:
            return
        yield message.name
        for item in message.fields:
            assert re.fullmatch(r"[a-z][a-z0-9_]*", item.name)
            yield item.name
        for inner in message.nested_types:
            yield from walk(inner)

    for message in FILES[name].DESCRIPTOR.message_types_by_name.values():
        missing = set(walk(message)) - documented
        assert not missing, f"{name}: {message.name} lacks a doc line on {sorted(missing)}"
