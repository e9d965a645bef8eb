"""Control calls reach every replica or say which one they did not; health and metrics are all's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.replicas.fleet import LocalFleet, Replica, replicas
from tests.server.serving import say, scripted, serving, user
from tokenplane.engine_adapter.contract_suite.suite import until
from tokenplane.engine_adapter.engine import EngineState
from tokenplane.engine_adapter.replicas.control_calls import ControlCall, merge_replies
from tokenplane.engine_adapter.replicas.replica_node import ReplicaNode
from tokenplane.schemas.errors import ConfigError
from tokenplane.staging.open_store import open_store


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


def versions(found: list[Replica]) -> list[int | None]:
    return [replica.node.parts.engine.weight_version() for replica in found]


async def test_a_change_reaches_every_replica_whichever_is_asked(url: str) -> None:
    async with replicas([scripted([]), scripted([])], url) as found:
        for version, replica in enumerate(found, start=11):
            reply = await replica.client.post("/admin/weight_version", json={"version": version})
            assert reply.status_code == 200
            assert reply.headers["x-tokenplane-replica"] == replica.node.name
            body = reply.json()
            assert body["version"] == version
            assert body["replicas"] == {"a": {"version": version}, "b": {"version": version}}
            assert versions(found) == [version, version]
        reply = await found[1].client.post("/admin/pause", json={"suspend": "recompute"})
        assert reply.json()["state"] == "suspended"
        states = {replica.node.parts.engine.state() for replica in found}
        assert states == {EngineState.SUSPENDED}
        assert (await found[0].client.post("/admin/resume")).json()["state"] == "running"
        assert {r.node.parts.engine.state() for r in found} == {EngineState.RUNNING}


async def test_a_change_with_a_replica_missing_changes_nothing(url: str) -> None:
    fleet = LocalFleet(gone={"b"})
    async with replicas([scripted([]), scripted([])], url, fleet=fleet) as found:
        reply = await found[0].client.post("/admin/weight_version", json={"version": 9})
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "replicas_incomplete"
        assert versions(found) == [7, 7]
        # A read is content with those that are there, and says how many there should be.
        status = (await found[0].client.get("/admin/status")).json()
        assert list(status["replicas"]) == ["a"]
        assert status["replicas_expected"] == 2


async def test_a_change_waits_for_a_replica_that_is_being_started(url: str) -> None:
    fleet = LocalFleet(gone={"b"})
    async with replicas([scripted([]), scripted([])], url, fleet=fleet, roll_call_s=30) as found:
        post = found[0].client.post("/admin/weight_version", json={"version": 9})
        changing = asyncio.create_task(post)
        await asyncio.sleep(0.3)
        assert not changing.done()
        fleet.gone.clear()
        assert (await changing).status_code == 200
        assert versions(found) == [9, 9]


async def test_where_one_replica_refuses_each_is_told(url: str) -> None:
    async with replicas([scripted([]), scripted([])], url) as found:
        await found[0].node.parts.engine.pause()
        await found[0].node.parts.engine.suspend("persist")
        reply = await found[1].client.post("/admin/pause", json={})
        body = reply.json()
        assert reply.status_code == 409
        assert body["error"]["code"] == "replicas_differ"
        assert {name: told["status"] for name, told in body["replicas"].items()} == {
            "a": 409,
            "b": 200,
        }
        assert body["replicas"]["a"]["error"]["code"] == "engine_state"
        bad = await found[0].client.post("/admin/weight_version", json={"version": -1})
        assert bad.status_code == 400
        assert bad.json()["error"]["param"] == "version"


async def test_one_replica_may_be_named_for_a_rolling_update(url: str) -> None:
    async with replicas([scripted([]), scripted([])], url) as found:
        body = {"version": 8}
        reply = await found[0].client.post("/admin/weight_version?replica=b", json=body)
        assert (reply.status_code, reply.json()) == (200, {"version": 8})
        assert versions(found) == [7, 8]
        merged = (await found[0].client.get("/admin/weight_version")).json()
        assert merged["version"] is None
        assert merged["replicas"] == {"a": {"version": 7}, "b": {"version": 8}}
        nobody = await found[0].client.post("/admin/weight_version?replica=z", json=body)
        assert nobody.status_code == 400
        assert nobody.json()["error"]["code"] == "unknown_replica"


async def test_two_changes_end_alike_on_every_replica(url: str) -> None:
    """The older of two changes comes later to one replica: it is refused there, never done last."""
    async with replicas([scripted([]), scripted([])], url) as found:

        def call(version: int, at: int) -> ControlCall:
            body = b'{"version": %d}' % version
            return ControlCall("POST", "/admin/weight_version", "", None, body, at)

        order = {"a": [call(20, 1), call(21, 2)], "b": [call(21, 2), call(20, 1)]}
        statuses: dict[str, list[int]] = {}
        for replica in found:
            name = replica.node.name
            replies = [await replica.node.answer(one) for one in order[name]]
            statuses[name] = [reply.status for reply in replies if reply is not None]
        assert statuses == {"a": [200, 200], "b": [200, 409]}
        assert versions(found) == [21, 21]


async def test_a_hanging_replica_is_a_deadline_and_not_a_hang(url: str) -> None:
    fleet = LocalFleet(hangs=True)
    async with replicas([scripted([]), scripted([])], url, fleet=fleet) as found:
        reply = await found[0].client.get("/admin/status")
        assert reply.status_code == 504
        health = await found[0].client.get("/health")
        assert health.status_code == 200
        assert health.json()["status"] == "degraded"
        assert 'replica="a"' in (await found[0].client.get("/metrics")).text


async def test_control_calls_ask_for_the_token_once_for_all(url: str) -> None:
    async with replicas([scripted([]), scripted([])], url, control_token="s3cret") as found:
        body = {"version": 9}
        for given in (None, "Bearer wrong"):
            headers = {} if given is None else {"Authorization": given}
            reply = await found[0].client.post("/admin/weight_version", json=body, headers=headers)
            assert reply.status_code == 401
        assert versions(found) == [7, 7]
        good = {"Authorization": "Bearer s3cret"}
        reply = await found[0].client.post("/admin/weight_version", json=body, headers=good)
        assert reply.status_code == 200
        assert versions(found) == [9, 9]


async def test_metrics_name_the_replica_of_each_sample(url: str) -> None:
    engines = [scripted([say("Hi.")]), scripted([say("Ho."), say("Hu.")])]
    async with replicas(engines, url) as found:
        for replica, count in zip(found, (1, 2), strict=True):
            for _ in range(count):
                assert (await replica.chat([user("a")])).status_code == 200
        text = (await found[0].client.get("/metrics")).text
        assert 'tokenplane_calls_total{outcome="staged",replica="a"} 1.0' in text
        assert 'tokenplane_calls_total{outcome="staged",replica="b"} 2.0' in text
        assert text.count("# TYPE tokenplane_calls_total counter") == 1


async def test_health_counts_replicas(url: str) -> None:
    engines = [scripted([]), scripted([])]
    fleet = LocalFleet()
    async with replicas(engines, url, fleet=fleet) as found:
        reply = await found[0].client.get("/health")
        assert (reply.status_code, reply.json()["status"]) == (200, "ok")
        engines[1].fail()
        reply = await found[0].client.get("/health")
        assert (reply.status_code, reply.json()["status"]) == (200, "degraded")
        assert reply.json()["replicas"]["b"]["engine"] == "dead"
        engines[0].fail()
        reply = await found[0].client.get("/health")
        assert (reply.status_code, reply.json()["status"]) == (503, "unavailable")


async def test_a_replica_with_old_weights_takes_no_call_until_they_are_named(url: str) -> None:
    engines = [scripted([say("Hi.")]), scripted([say("Ho.")])]
    async with replicas(engines, url, allow_weight_edit=True) as found:
        old, other = found
        await other.node.parts.engine.set_weight_version(9)
        await old.node.join([other.node.describe()])
        assert old.node.behind
        for stream in (False, True):
            reply = await old.chat([user("a")], stream=stream)
            assert reply.status_code == 503
            assert reply.json()["error"]["code"] == "weights_behind"
        health = (await other.client.get("/health")).json()
        assert (health["status"], health["replicas"]["a"]["behind"]) == ("degraded", True)
        # Scaling other weights would not make them the same.
        scaled = await other.client.post("/admin/perturb_weights", json={"scale": 2, "version": 10})
        assert scaled.json()["replicas"]["a"]["error"]["code"] == "weights_behind"
        named = await other.client.post("/admin/weight_version", json={"version": 11})
        assert named.status_code == 200
        assert (await old.chat([user("a")])).status_code == 200
        assert not old.served.store.keys("failures")


async def test_a_replica_joins_a_fleet_that_stands_down(url: str) -> None:
    async with replicas([scripted([]), scripted([])], url) as found:
        first, late = found
        for mode in ("pause", "suspend"):
            if mode == "pause":
                await first.node.parts.engine.pause()
            else:
                await first.node.parts.engine.suspend("persist")
                await late.node.parts.engine.unpause()
            await late.node.join([first.node.describe()])
            assert late.node.parts.engine.state() is first.node.parts.engine.state()
            assert not late.node.behind
        await late.node.join([])
        assert not late.node.behind


async def test_a_drain_ends_what_outlasts_it(url: str) -> None:
    engine = scripted([say("word " * 400), say("Hi.")], step_s=0.01)
    async with replicas([engine], url) as found:
        replica = found[0]
        running = asyncio.create_task(replica.chat([user("a")]))
        await until(lambda: engine.stats().generated_tokens > 2)
        assert await replica.node.drain(0.2) == 1
        reply = await running
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "server_stopped"
        refused = await replica.chat([user("b")])
        assert refused.status_code == 503
        await until(lambda: bool(replica.served.store.keys("failures")))
        assert (await replica.served.failures()) == ["server_stopped"]


async def test_a_drain_waits_for_what_ends_in_time(url: str) -> None:
    engine = scripted([say("one two three four")], step_s=0.01)
    async with replicas([engine], url) as found:
        running = asyncio.create_task(found[0].chat([user("a")]))
        await until(lambda: engine.stats().generated_tokens > 2)
        assert await found[0].node.drain(60) == 0
        assert (await running).status_code == 200


async def test_a_private_store_is_refused() -> None:
    with open_store("memory:") as store:
        async with serving(scripted([]), store=store) as served:
            with pytest.raises(ConfigError, match="share"):
                ReplicaNode("a", served.parts, served.app)


def test_a_read_that_nobody_answers_is_an_error() -> None:
    status, body = merge_replies("GET", [], 2)
    assert status == 503
    assert body["error"]["code"] == "replicas_incomplete"
