"""Options: where they come from, what is said of wrong ones, and that the page about them is true."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.cluster import config_docs
from octavo.cluster.config_sources import load_config, misspelt_variables
from octavo.cluster.service_config import ServiceConfig
from octavo.protos.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "octavo.yaml"
        path.write_text(text)
        return path

    return write


def test_flags_over_environment_over_file_over_defaults(file):
    path = file("num_workers: 2\nport: 81\nhost: '::1'\napi_keys: [a, b]\nitl_target: 1\n")
    environment = {"OCTAVO_PORT": "82", "OCTAVO_HOST": "0.0.0.0", "OCTAVO_PREFIX_CACHE": "false"}
    config = load_config({"host": "10.0.0.1"}, file=path, environment=environment)
    assert (config.num_workers, config.port, config.host) == (2, 82, "10.0.0.1")
    assert (config.api_keys, config.itl_target, config.prefix_cache) == (("a", "b"), 1.0, False)
    assert config.block_size == 16
    assert load_config(environment={"OCTAVO_CONFIG": str(path)}).port == 81
    assert load_config(environment={"OCTAVO_API_KEY": "a, b"}).api_keys == ("a", "b")
    assert load_config(file=file(""), environment={}) == ServiceConfig()


@pytest.mark.parametrize(
    ("flags", "environment", "text", "message"),
    [
        ({"block_size": 0}, {}, "", "block_size must be an integer of at least 1, got 0 (from --block-size)"),
        (
            {},
            {"OCTAVO_NUM_WORKERS": "0"},
            "",
            "num_workers must be at least 1, got 0 (from OCTAVO_NUM_WORKERS)",
        ),
        (
            {},
            {"OCTAVO_NUM_WORKERS": "two"},
            "",
            "num_workers must be an integer, got 'two' (from OCTAVO_NUM_WORKERS)",
        ),
        ({}, {}, "port: '80'", "port must be an integer, got '80' (from port in FILE)"),
        ({}, {}, "host_blocks: -1", "host_blocks must be an integer of at least 0, got -1 (from host_blocks in FILE)"),
        ({}, {}, "workers: 2", "there is no option 'workers'; did you mean num_workers? (in FILE)"),
        ({}, {}, "api_keys: secret", "api_keys must be a list of strings, got something else (from api_keys in FILE)"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_told_with_field_value_limit_and_source(file, flags, environment, text, message):
    path = file(text)
    with pytest.raises(ConfigError) as caught:
        load_config(flags, file=path, environment=environment)
    assert caught.value.message == message.replace("FILE", str(path))


@pytest.mark.parametrize("text", ["- a\n", "a: [", "1: 2", "\x00"])
def test_a_file_that_is_none_is_named(file, text):
    path = file(text)
    with pytest.raises(ConfigError, match=r"octavo\.yaml"):
        load_config(file=path, environment={})
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(file=path.with_name("gone"), environment={})


def test_keys_are_not_printed():
    assert "secret" not in repr(ServiceConfig(api_keys=("secret",)))


def test_variables_that_nearly_name_an_option_are_told():
    (line,) = misspelt_variables({"OCTAVO_BLOCKSIZE": "8", "OCTAVO_CACHE": "/x", "OCTAVO_PORT": "1"})
    assert line == "OCTAVO_BLOCKSIZE in the environment is no option; did you mean OCTAVO_BLOCK_SIZE?"


def test_the_page_of_options_is_up_to_date():
    """`python -m octavo.cluster.config_docs > docs/configuration.md` mends it."""
    assert (ROOT / "docs" / "configuration.md").read_text("utf-8") == config_docs.page()
