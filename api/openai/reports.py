"""What an engine tells of itself: models, tokens, health, metrics, and the `/debug` routes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from actors.messages.admission import BlocksReport, ReportBlocks, RequestStory, StoryOf
from api.deadlines import read_body
from api.engine_handle import EngineHandle, served_model
from api.errors import ApiError
from api.middleware import json_response
from api.openai.bodies import json_object, tokenize_body
from api.openai.messages import template_messages
from api.openai.preparation import check_model
from api.openai.tokenizing import Tokenizer
from api.serving import PORT

ASK_SECONDS = 5.0


class Reports:
    def __init__(
        self, engine: EngineHandle, tokenizer: Tokenizer, engine_id_of: Callable[[str], str], started_at: int
    ) -> None:
        """`engine_id_of` finds the engine's id of a request from its X-Request-ID; `started_at`: seconds since 1970."""
        self._engine, self._tokenizer, self._engine_id_of = engine, tokenizer, engine_id_of
        self._started_at = started_at

    async def models(self, request: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: web.Request) -> web.Response:
        check_model(self._engine, request.match_info["model"])
        return json_response(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": served_model(self._engine),
            "object": "model",
            "created": self._started_at,
            "owned_by": "kvyard",
            "max_model_len": self._engine.max_model_len,
        }

    async def tokenize(self, request: web.Request) -> web.Response:
        body = tokenize_body(json_object(await read_body(request, self._engine.configuration.request_timeout)))
        if body.model is not None:
            check_model(self._engine, body.model)
        if body.messages is not None:
            tokens = await self._tokenizer.encode_messages(
                template_messages(body.messages),
                add_generation_prompt=body.add_generation_prompt is not False,
                add_special_tokens=bool(body.add_special_tokens),
            )
        else:
            tokens = await self._tokenizer.encode_prompt(
                body.prompt or "", add_special_tokens=body.add_special_tokens is not False
            )
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": self._engine.max_model_len})

    async def health(self, request: web.Request) -> web.Response:
        health = self._engine.health()
        return json_response(health, 200 if health.healthy else 503)

    async def ready(self, request: web.Request) -> web.Response:
        health = self._engine.health()
        return json_response(health, 200 if health.healthy and health.ready else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        text, content_type = self._engine.metrics.exposition()
        return web.Response(body=text, headers={"Content-Type": content_type})

    async def blocks(self, request: web.Request) -> web.Response:
        report: BlocksReport = await self._engine.admission.ask(ReportBlocks(), ASK_SECONDS)
        return json_response(_untagged(report))

    async def story(self, request: web.Request) -> web.Response:
        request_id = self._engine_id_of(request.match_info["request_id"])
        story: RequestStory | None = await self._engine.admission.ask(StoryOf(request_id), ASK_SECONDS)
        if story is None:
            raise ApiError(404, f"this engine knows no request {request_id}", code="unknown_request")
        return json_response(_story(story, self._engine.clock()))

    async def engine(self, request: web.Request) -> web.Response:
        engine = self._engine
        configuration, health = engine.configuration, engine.health()
        port = request.app[PORT][-1] if request.app[PORT] else configuration.port
        layout = engine.description.kv_layout(configuration.dtype, configuration.block_size, configuration.kv_dtype)
        return json_response(
            {
                "engine_id": engine.engine_id,
                "role": configuration.role,
                "url": f"http://{configuration.host}:{port}",
                "pid": os.getpid(),
                "worker_pids": list(engine.worker_pids),
                "epoch": engine.epoch,
                "healthy": health.healthy,
                "reason": health.reason,
                "paused": engine.metrics.stats.paused,
                "model": served_model(engine),
                "kv_layout": layout,
                "transport": engine.transport,
                "incompatible_peers": dict(engine.incompatible_peers()),
                "max_model_len": engine.max_model_len,
            }
        )


def _untagged(message: msgspec.Struct) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(message)
    del values["type"]
    return values


def _story(story: RequestStory, now: float) -> dict[str, Any]:
    """Seconds since the request's arrival. `seconds` of all intervals add up to `wall_s`."""
    start = story.intervals[0].start if story.intervals else now
    intervals = [
        {
            "reason": interval.reason,
            "start_s": interval.start - start,
            "end_s": None if interval.end is None else interval.end - start,
            "seconds": (now if interval.end is None else interval.end) - interval.start,
            "detail": interval.detail,
        }
        for interval in story.intervals
    ]
    wall = (story.intervals[-1].end or now) - start if story.intervals else 0.0
    return {"request_id": story.request_id, "finished": story.finished, "wall_s": wall, "intervals": intervals}
