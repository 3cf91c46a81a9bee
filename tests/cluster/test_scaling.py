"""The coordinator asks for the number of workers that the policy wants, and takes no other while it does."""

from __future__ import annotations

import pytest

from octavo.cluster import coordinator as coordinator_module
from octavo.cluster.coordinator import REFUSED_SECONDS, Coordinator
from octavo.cluster.coordinator_core import CoordinatorConfig
from octavo.cluster.fleet import worker_resources
from octavo.cluster.service import ServiceConfig
from octavo.protos.errors import ConfigError
from octavo.scheduler.autoscaling import AutoscalingConfig, Decision

from .support import run


class Policy:
    """Wants what it is told to."""

    config = AutoscalingConfig(workers_max=3)
    wanted = 1

    def observe(self, load, now):
        assert load.num_expected == 1
        return Decision(self.wanted, "somebody waits")


def test_what_the_policy_wants_is_asked_for_and_asked_for_again_after_a_refusal(monkeypatch):
    async def test():
        now = 1000.0
        monkeypatch.setattr(coordinator_module.time, "monotonic", lambda: now)
        config = CoordinatorConfig(worker_ids=("worker-0",))
        coordinator = Coordinator(config, loopback=True, autoscaling=Policy.config)
        policy = Policy()

        async def wish():
            coordinator._follow_load(policy)
            return (await coordinator.scaling())[0]

        assert await wish() is None
        policy.wanted = 2
        wanted = await wish()
        assert (wanted.num_workers, wanted.reason, wanted.refusal) == (2, "somebody waits", None)
        await coordinator.refuse(wanted, "no room")
        assert (await wish()).refusal == "no room", "not asked for again at once"
        now += REFUSED_SECONDS
        assert (await wish()).refusal is None
        policy.wanted = 1
        assert await wish() is None
        with pytest.raises(ConfigError, match="follows the load, between 1 and 3"):
            await coordinator.want(2)
        coordinator._looking.cancel()
        await coordinator.address()
        await coordinator._server.stop(0)

    run(test())


def test_workers_of_a_fleet_that_may_grow_leave_room_for_the_others():
    fixed = ServiceConfig(num_workers=1).worker_configs(cores=8, device="cpu")
    grows = ServiceConfig(num_workers=1, scale_max=4).worker_configs(cores=8, device="cpu")
    assert [config.num_threads for config in (*fixed, *grows)] == [8, 2]
    assert worker_resources(grows[0])["num_cpus"] * 4 <= 8


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"scale_max": 0}, "scale_max"),
        ({"scale_max": 2, "scale_min": 3}, "scale_max"),
        ({"scale_max": 2, "num_workers": 3}, "num_workers"),
        ({"scale_max": 4, "scale_min": 2}, "num_workers"),
        ({"scale_max": 2, "scale_wait_target": 0.0}, "scale_wait_target"),
        ({"scale_max": 2, "scale_up_after": -1.0}, "scale_up_after"),
        ({"scale_max": 2, "scale_down_after": float("inf")}, "scale_down_after"),
    ],
)
def test_wrong_options_are_named(options, param):
    with pytest.raises(ConfigError) as error:
        ServiceConfig(**options)
    assert error.value.param == param
    assert param in error.value.message
