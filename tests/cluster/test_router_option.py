"""The router's policy is an option of the coordinator."""

from __future__ import annotations

import pytest

from octavo.cluster.coordinator_config import CoordinatorConfig
from octavo.protos.errors import ConfigError
from octavo.scheduler.router import ROUTER_POLICIES


@pytest.mark.parametrize("policy", ROUTER_POLICIES)
def test_known_policies(policy):
    assert CoordinatorConfig(worker_ids=("w0",), router_policy=policy).router_policy == policy


def test_an_unknown_policy_is_refused_by_name():
    with pytest.raises(ConfigError) as caught:
        CoordinatorConfig(worker_ids=("w0",), router_policy="best")
    assert caught.value.param == "router_policy"
