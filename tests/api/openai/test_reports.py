"""Health, metrics, models and /debug: values by hand."""

from __future__ import annotations

import os

import pytest
from prometheus_client.parser import text_string_to_metric_families

from actors.messages.model import ModelDescription
from actors.observer import EngineStats, Observer
from api.engine_handle import Health
from api.metrics import EngineMetrics
from api.openai import completion
from tests.api.openai.scripted import MODEL, Script, serving


async def test_health_and_ready(description: ModelDescription) -> None:
    async with serving(description) as server:
        for verdict, health, ready in (
            (Health(healthy=True), 200, 200),
            (Health(healthy=True, ready=False, reason="it drains"), 200, 503),
            (Health(healthy=False, reason="a step runs for 60 s", details={"step": 5}), 503, 503),
        ):
            server.engine.verdict = verdict
            for path, status in (("/health", health), ("/ready", ready)):
                found, body = await server.get(path)
                assert (found, body["reason"], body["details"]) == (status, verdict.reason, verdict.details)
                async with server.http.head(server.url + path) as response:
                    assert response.status == status


async def test_models(description: ModelDescription) -> None:
    model = {"id": MODEL, "object": "model", "created": 1_700_000_000, "owned_by": "kvyard", "max_model_len": 8192}
    async with serving(description) as server:
        assert await server.get("/v1/models") == (200, {"object": "list", "data": [model]})
        assert await server.get(f"/v1/models/{MODEL}") == (200, model)


async def test_debug_engine(description: ModelDescription) -> None:
    async with serving(description, role="decode", kv_dtype="int8") as server:
        server.engine.peers = {"prefill-1": "dtype: ours 'bfloat16', theirs 'float32'"}
        server.engine.verdict = Health(healthy=False, reason="hung")
        server.engine.metrics.stats_changed(EngineStats(paused="new"))
        _, body = await server.get("/debug/engine")
        layout = body.pop("kv_layout")
        assert body == {
            "engine_id": "decode-0",
            "role": "decode",
            "url": server.url,
            "pid": os.getpid(),
            "worker_pids": [4242],
            "epoch": 7,
            "healthy": False,
            "reason": "hung",
            "paused": "new",
            "model": MODEL,
            "transport": "tcp",
            "incompatible_peers": server.engine.peers,
            "max_model_len": 8192,
        }
        # SmolLM2, from models.md.
        assert (layout["num_layers"], layout["num_kv_heads"], layout["head_size"]) == (30, 3, 64)
        assert (layout["model_digest"], layout["dtype"]) == (description.digest, "bfloat16")
        assert layout["kv_dtype"] == "int8"


async def test_debug_blocks(description: ModelDescription) -> None:
    async with serving(description) as server:
        grant = {
            "request_id": "known",
            "generation": 1,
            "state": "held",
            "blocks": 3,
            "age_s": 0.5,
            "reason": "running",
        }
        expected = {"usable": 10, "free": 7, "held": 3, "fenced": 0, "leased": 0, "quarantined": 0, "grants": [grant]}
        assert await server.get("/debug/blocks") == (200, expected)


async def test_debug_requests(description: ModelDescription) -> None:
    async with serving(description) as server:
        status, story = await server.get("/debug/requests/known")
        waiting = {"reason": "waiting", "start_s": 0.0, "end_s": 0.5, "seconds": 0.5, "detail": "budget"}
        running = {"reason": "running", "start_s": 0.5, "end_s": 2.0, "seconds": 1.5, "detail": ""}
        assert status == 200
        assert story == {"request_id": "known", "finished": True, "wall_s": 2.0, "intervals": [waiting, running]}
        status, body = await server.get("/debug/requests/unknown")
        assert (status, body["error"]["code"]) == (404, "unknown_request")


async def test_a_story_is_found_by_the_clients_own_id(description: ModelDescription) -> None:
    async with serving(description) as server:
        await server.post("/v1/completions", {"model": MODEL, "prompt": "x"}, **{"X-Request-ID": "mine"})
        # The script knows no story but "known": the id that it was asked for is in the answer.
        _, body = await server.get("/debug/requests/mine")
        assert server.admission.request.request_id in body["error"]["message"]


async def test_old_ids_are_forgotten(description: ModelDescription, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "REMEMBERED_IDS", 2)
    async with serving(description) as server:
        for name in ("first", "second", "third"):
            await server.post("/v1/completions", {"model": MODEL, "prompt": "x"}, **{"X-Request-ID": name})
        messages = [(await server.get(f"/debug/requests/{name}"))[1]["error"]["message"] for name in ("first", "third")]
    assert messages[0].endswith("first")
    assert "cmpl-" in messages[1]


async def test_metrics(description: ModelDescription) -> None:
    async with serving(description) as server:
        server.admission.script = Script(((5000,), (5001,), (5002,)))
        await server.post("/v1/completions", {"model": MODEL, "prompt": "x"})
        await server.post("/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 3})
        await server.post("/v1/completions", {"model": MODEL, "prompt": ""})
        metrics = server.engine.metrics
        metrics.stats_changed(
            EngineStats(
                running=1,
                waiting=2,
                skipped=3,
                blocks_free=4,
                blocks_held=5,
                blocks_fenced=6,
                blocks_leased=7,
                blocks_quarantined=8,
                prefix_hit_tokens_total=9,
                preemptions_total=10,
                paused="all",
            )
        )
        metrics.load_ended("landed", 0.25, 1000)
        metrics.load_ended("failed", 9.0, 0)
        async with server.http.get(server.url + "/metrics") as response:
            assert response.content_type == "text/plain"
            text = await response.text()
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    expected = {
        ("kvyard_requests_running",): 1,
        ("kvyard_requests_waiting",): 2,
        ("kvyard_requests_skipped",): 3,
        ("kvyard_kv_blocks", "free"): 4,
        ("kvyard_kv_blocks", "held"): 5,
        ("kvyard_kv_blocks", "fenced"): 6,
        ("kvyard_kv_blocks", "leased"): 7,
        ("kvyard_kv_blocks", "quarantined"): 8,
        ("kvyard_prefix_cache_hit_tokens_total",): 9,
        ("kvyard_preemptions_total",): 10,
        ("kvyard_paused", "new"): 0,
        ("kvyard_paused", "all"): 1,
        ("kvyard_requests_total", "stop"): 1,
        ("kvyard_requests_total", "length"): 1,
        ("kvyard_requests_total", "abort"): 0,
        ("kvyard_requests_total", "error"): 0,
        ("kvyard_requests_total", "refused"): 1,
        ("kvyard_kv_transfer_bytes_total",): 1000,
        ("kvyard_kv_transfer_seconds_count",): 1,
        ("kvyard_kv_transfer_seconds_sum",): 0.25,
        ("kvyard_kv_loads_total", "landed"): 1,
        ("kvyard_kv_loads_total", "failed"): 1,
        ("kvyard_kv_loads_total", "recomputed"): 0,
        ("kvyard_time_to_first_token_seconds_count",): 2,
        # Four tokens with the end token, then three: one less each.
        ("kvyard_time_between_tokens_seconds_count",): 3 + 2,
    }
    assert {key: found.get(key) for key in expected} == expected


def test_tokens_of_one_output_share_its_time() -> None:
    metrics = EngineMetrics(engine_id="x")
    metrics.tokens_followed(0.6, 3)
    value = metrics.registry.get_sample_value
    assert value("kvyard_time_between_tokens_seconds_count") == 3
    assert value("kvyard_time_between_tokens_seconds_sum") == pytest.approx(0.6)
    assert value("kvyard_time_between_tokens_seconds_bucket", {"le": "0.25"}) == 3
    assert value("kvyard_time_between_tokens_seconds_bucket", {"le": "0.15"}) == 0


def test_the_metrics_are_an_observer() -> None:
    metrics = EngineMetrics(engine_id="x")
    observer: Observer = metrics
    observer.step_completed(100, 3, 0.05)
    observer.executor_worked(busy=2.0, idle=0.75, idle_although_runnable=0.25)
    observer.blocks_sent(500)
    observer.lease_expired()
    observer.peer_lost("prefill-0")
    observer.load_refused_by_layout("prefill-1", "block_size: ours 16, theirs 32")
    value = metrics.registry.get_sample_value
    assert value("kvyard_step_seconds_sum") == 0.05
    assert value("kvyard_step_tokens_total") == 100
    assert value("kvyard_executor_busy_seconds_total") == 2.0
    assert value("kvyard_executor_idle_seconds_total", {"work": "runnable"}) == 0.25
    assert value("kvyard_executor_idle_seconds_total", {"work": "none"}) == 0.5
    assert value("kvyard_kv_sent_bytes_total") == 500
    assert value("kvyard_leases_expired_total") == 1
    assert value("kvyard_peers_lost_total") == 1
    assert value("kvyard_kv_layout_refusals_total") == 1
    assert metrics.incompatible_peers == {"prefill-1": "block_size: ours 16, theirs 32"}
    assert value("kvyard_engine_info", {"engine": "x"}) == 1
