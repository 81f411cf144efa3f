"""The HTTP application of one engine: routes and what stands before them."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime

from aiohttp import web

from api.admin import PATHS, Admin
from api.engine_handle import EngineHandle
from api.middleware import add_request_id, openai_errors, request_ids, require_key
from api.openai.completion import Completions
from api.openai.reports import Reports
from api.openai.tokenizing import Tokenizer
from api.serving import PORT

PROTECTED = ("/v1", "/tokenize", "/debug", "/admin")


def make_app(
    engine: EngineHandle, wall_clock: Callable[[], float] = time.time, tokenizer: Tokenizer | None = None
) -> web.Application:
    """Serve it with `api.serving.serve`. Without `tokenizer` it is read from the model's folder, which takes some
    tenths of a second; raises ConfigurationError when it cannot be read."""
    configuration = engine.configuration
    app = web.Application(
        middlewares=[request_ids(engine.new_id), openai_errors, require_key(configuration.api_key, PROTECTED)],
        client_max_size=configuration.max_body_bytes,
    )
    app[PORT] = []
    app.on_response_prepare.append(add_request_id)
    if tokenizer is None:
        tokenizer = Tokenizer(engine.description, lambda: datetime.fromtimestamp(wall_clock()))
    completions = Completions(engine, tokenizer, wall_clock)
    reports = Reports(engine, tokenizer, completions.engine_id_of, started_at=int(wall_clock()))
    app.router.add_post("/v1/chat/completions", completions.chat)
    app.router.add_post("/v1/completions", completions.completions)
    app.router.add_get("/v1/models", reports.models)
    app.router.add_get("/v1/models/{model:.+}", reports.model)
    app.router.add_post("/tokenize", reports.tokenize)
    app.router.add_get("/health", reports.health)
    app.router.add_get("/ready", reports.ready)
    app.router.add_get("/metrics", reports.metrics)
    app.router.add_get("/debug/blocks", reports.blocks)
    app.router.add_get("/debug/requests/{request_id}", reports.story)
    app.router.add_get("/debug/engine", reports.engine)
    admin = Admin(engine)
    for path in PATHS:
        app.router.add_post(path, admin.order)
    return app
