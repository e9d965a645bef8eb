"""Control routes: who may call them, what they show, what they do, and how long they wait."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.server.serving import (
    Served,
    message_of,
    say,
    scripted,
    serving,
    tiny_engine,
    user,
)
from tokenplane.engine_adapter.contract_suite.suite import until
from tokenplane.schemas.manifest import RolloutManifest
from tokenplane.staging.memory_backend.store import MemoryStore

ROUTES = [
    ("GET", "/rollouts/r1/manifest"),
    ("GET", "/rollouts/r1/rows"),
    ("GET", "/rollouts/r1/failures"),
    ("GET", "/admin/status"),
    ("GET", "/admin/weight_version"),
    ("POST", "/admin/weight_version"),
    ("POST", "/admin/pause"),
    ("POST", "/admin/resume"),
    ("POST", "/admin/perturb_weights"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_every_control_route_asks_for_the_token(method: str, path: str) -> None:
    async with serving(scripted([]), control_token="s3cret", allow_weight_edit=True) as served:
        for given in (None, "Bearer wrong", "Bearer s3cre", "s3cret", "Basic s3cret", "Bearer é"):
            headers = [] if given is None else [(b"Authorization", given.encode())]
            reply = await served.client.request(method, path, headers=headers, json={})
            assert reply.status_code == 401, given
            assert reply.json()["error"]["code"] == "unauthorized"
            assert reply.headers["www-authenticate"] == "Bearer"
        good = {"Authorization": "Bearer s3cret"}
        assert (await served.client.request(method, path, headers=good)).status_code != 401


async def test_model_calls_do_not_need_the_control_token() -> None:
    async with serving(scripted([say("Hi.")]), control_token="s3cret") as served:
        assert (await served.chat([user("a")])).status_code == 200


async def test_weights_can_be_edited_only_where_it_is_allowed() -> None:
    async with serving(scripted([])) as served:
        reply = await served.client.post("/admin/perturb_weights", json={"scale": 2, "version": 9})
        assert reply.status_code == 404


async def rolled(served: Served) -> None:
    messages = [user("a")]
    for _ in range(2):
        messages += [message_of(await served.chat(messages, seed=3)), user("b")]
    await served.chat([user("z"), {"role": "assistant", "content": "never"}, user("y")])


async def test_manifest_rows_and_failures_of_a_rollout() -> None:
    async with serving(scripted([say("1"), say("2"), say("3")])) as served:
        await rolled(served)
        manifest = RolloutManifest.model_validate(
            (await served.client.get("/rollouts/r1/manifest")).json()
        )
        staged = served.rows()
        assert [r.staging_key for r in manifest.records] == [row.staging_key for row in staged]
        assert [f.reason for f in manifest.failures] == ["unresolved_parent"]
        listed = (await served.client.get("/rollouts/r1/rows")).json()["rows"]
        for shown, row in zip(listed, staged, strict=True):
            assert shown["staging_key"] == row.staging_key
            assert shown["carried"] + shown["generated"] == row.call.delta_len
            assert shown["policy_epochs"] == [[0, 7]]
            assert shown["sampling"]["seed"] == 3
            assert shown["stage_ms"] > 0
            assert shown["timings"]["total_s"] >= shown["timings"]["stage_s"]
            assert "token_ids_delta" not in shown
        with_tokens = (await served.client.get("/rollouts/r1/rows?tokens=1")).json()["rows"]
        for shown, row in zip(with_tokens, staged, strict=True):
            assert shown["token_ids_delta"] == row.call.token_ids_delta.tolist()
            assert shown["token_mask_delta"] == row.call.token_mask_delta.tolist()
            log_probs = row.call.generation_log_probs_delta.tolist()
            assert shown["generation_log_probs_delta"] == log_probs
        failures = (await served.client.get("/rollouts/r1/failures")).json()["failures"]
        assert failures[0]["code"] == "unresolved_parent"
        assert failures[0]["message"]


async def test_an_unknown_rollout_is_empty() -> None:
    async with serving(scripted([])) as served:
        manifest = (await served.client.get("/rollouts/nobody/manifest")).json()
        assert (manifest["records"], manifest["failures"]) == ([], [])
        assert (await served.client.get("/rollouts/nobody/rows")).json()["rows"] == []


async def test_prefixes_of_rollout_names_do_not_mix() -> None:
    async with serving(scripted([say("1"), say("2")])) as served:
        await served.chat([user("a")], rollout="r1")
        await served.chat([user("a")], rollout="r10")
        for name in ("r1", "r10"):
            reply = await served.client.get(f"/rollouts/{name}/rows")
            assert [row["rollout_id"] for row in reply.json()["rows"]] == [name]


async def test_the_weight_version_is_set_and_stamped() -> None:
    async with serving(scripted([say("1"), say("2")])) as served:
        assert (await served.client.get("/admin/weight_version")).json() == {"version": 7}
        await served.chat([user("a")])
        reply = await served.client.post("/admin/weight_version", json={"version": 8})
        assert reply.json() == {"version": 8}
        await served.chat([user("b")])
        assert [row.call.weight_version for row in served.rows()] == [7, 8]
        for version in (-1, 1.5, "9", None, True):
            bad = await served.client.post("/admin/weight_version", json={"version": version})
            assert bad.status_code == 400
        assert (await served.client.get("/admin/weight_version")).json() == {"version": 8}


async def test_pause_and_resume() -> None:
    engine = scripted([say("1"), say("2")])
    async with serving(engine) as served:
        for body in ({}, {"suspend": "persist"}, {"suspend": "recompute"}):
            reply = await served.client.post("/admin/pause", json=body)
            expected = "suspended" if body else "paused"
            assert reply.json() == {"state": expected}
            assert (await served.client.get("/health")).json()["engine"] == expected
            assert (await served.client.post("/admin/resume")).json() == {"state": "running"}
        bad = await served.client.post("/admin/pause", json={"suspend": "never"})
        assert bad.status_code == 400
        assert (await served.client.get("/admin/status")).json()["state"] == "running"
        await served.client.post("/admin/pause")
        waiting = asyncio.create_task(served.chat([user("a")]))
        await until(lambda: engine.stats().waiting_requests == 1)
        await served.client.post("/admin/resume")
        assert (await waiting).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/admin/weight_version", {"version": 8, "versoin": 9}, "version; got 'versoin'"),
        ("/admin/pause", {"suspnd": "persist"}, "suspend; got 'suspnd'"),
        ("/admin/resume", {"suspend": "persist"}, "no field; got 'suspend'"),
        ("/admin/perturb_weights", {"scale": 2, "version": 8, "x": 1}, "version; got 'x'"),
    ],
)
async def test_a_misspelled_field_changes_nothing(
    path: str, body: dict[str, Any], named: str
) -> None:
    async with serving(scripted([]), allow_weight_edit=True) as served:
        reply = await served.client.post(path, json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_request")
        assert named in reply.json()["error"]["message"]
        status = (await served.client.get("/admin/status")).json()
        assert (status["state"], status["weight_version"]) == ("running", 7)


async def test_whether_tokens_are_shown_is_asked_for_exactly() -> None:
    async with serving(scripted([say("1")])) as served:
        await served.chat([user("a")])
        for asked, shown in (("0", False), ("1", True)):
            reply = await served.client.get(f"/rollouts/r1/rows?tokens={asked}")
            assert ("token_ids_delta" in reply.json()["rows"][0]) is shown
        for asked in ("no", "False", ""):
            reply = await served.client.get(f"/rollouts/r1/rows?tokens={asked}")
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tokens")


async def test_a_wrong_state_is_a_conflict() -> None:
    async with serving(scripted([])) as served:
        await served.client.post("/admin/pause", json={"suspend": "persist"})
        reply = await served.client.post("/admin/pause")
        assert reply.status_code == 409
        assert reply.json()["error"]["code"] == "engine_state"


async def test_status_shows_engine_cache_and_store() -> None:
    async with serving(scripted([say("1"), say("2"), say("3")])) as served:
        await rolled(served)
        status = (await served.client.get("/admin/status")).json()
        assert status["state"] == "running"
        assert status["weight_version"] == 7
        assert status["staged_calls"] == status["store"]["staged"]["rows"] == 2
        assert status["capture_failures"] == {"unresolved_parent": 1}
        assert status["prefix_cache"]["hits"] == 1
        assert status["engine_stats"]["finished_requests"] == 3


class StuckStore(MemoryStore):
    """Never answers a listing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def keys(self, partition: str, prefix: str = "") -> list[str]:
        self.let_go.wait(30)
        return super().keys(partition, prefix)


async def test_a_control_call_that_hangs_is_given_up_with_its_own_error() -> None:
    store = StuckStore()
    async with serving(scripted([]), store=store, control_timeout_s=0.05) as served:
        reply = await served.client.get("/rollouts/r1/manifest")
        assert reply.status_code == 504
        assert reply.json()["error"]["code"] == "deadline_exceeded"
        store.let_go.set()


@pytest.mark.engine
async def test_a_busy_engine_does_not_hang_a_control_call() -> None:
    engine = tiny_engine()
    begun, go_on = threading.Event(), threading.Event()

    def slow(_model: Any) -> None:
        begun.set()
        go_on.wait(30)

    async with serving(engine, control_timeout_s=0.2) as served:
        update = asyncio.create_task(engine.update_weights(slow, version=8))
        await until(begun.is_set)
        reply = await served.client.post("/admin/weight_version", json={"version": 9})
        assert reply.status_code == 504
        assert reply.json()["error"]["code"] == "deadline_exceeded"
        go_on.set()
        await update
        assert engine.weight_version() == 8


@pytest.mark.parametrize("body", [{"version": 8}, {"scale": 0, "version": 8}, {"scale": 2}])
async def test_a_bad_perturbation_changes_nothing(body: dict[str, Any]) -> None:
    async with serving(scripted([]), allow_weight_edit=True) as served:
        reply = await served.client.post("/admin/perturb_weights", json=body)
        assert reply.status_code == 400
        assert served.parts.engine.weight_version() == 7
