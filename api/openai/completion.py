"""POST /v1/chat/completions and /v1/completions: one way for both, streaming or not.

    bytes → body → Prepared → (AdmissionActor) → Generation → events or one object

Invariant: an answer ends within its deadline: with its text, with an HTTP error, or with an error event.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

import anyio
from aiohttp import web
from msgspec import UNSET, UnsetType

from actors.messages.errors import RefusalReason, RequestRefused
from actors.messages.lease import Ticket
from api.deadlines import TIMEOUT_HEADER, deadline_exceeded, read_body
from api.engine_handle import EngineHandle, served_model
from api.middleware import REQUEST_ID, client_view, json_response
from api.openai.bodies import chat_body, completions_body
from api.openai.event_stream import EventStream, abort_connection
from api.openai.generation import Generation, submitted
from api.openai.preparation import Parse, Preparation, Prepared
from api.openai.responses import Shape, Usage
from api.openai.tokenizing import Tokenizer
from connectors.ticket import seal

REMEMBERED_IDS = 4096


class Completions:
    def __init__(self, engine: EngineHandle, tokenizer: Tokenizer, wall_clock: Callable[[], float]) -> None:
        self._engine, self._tokenizer, self._wall_clock = engine, tokenizer, wall_clock
        self._preparation = Preparation(engine, tokenizer)
        self._engine_ids: OrderedDict[str, str] = OrderedDict()

    def engine_id_of(self, request_id: str) -> str:
        """The engine's id of the request that was answered with this X-Request-ID; any other comes back as it is."""
        return self._engine_ids.get(request_id, request_id)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat_body, "chatcmpl-")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, completions_body, "cmpl-")

    async def _answer(self, request: web.Request, parse: Parse, prefix: str) -> web.StreamResponse:
        arrival = self._engine.clock()
        request_id = prefix + self._engine.new_id()
        self._remember(request[REQUEST_ID], request_id)
        try:
            prepared = await self._prepare(request, parse, request_id, arrival)
        except BaseException as error:
            self._engine.metrics.request_ended("refused" if isinstance(error, Exception) else "abort")
            raise
        shape = Shape(
            id=request_id,
            created=int(self._wall_clock()),
            model=served_model(self._engine),
            system_fingerprint="fp_" + self._engine.description.digest[:10],
            chat=prepared.chat,
        )
        detokenizer, trace_id = self._tokenizer.detokenizer(), request[REQUEST_ID]
        async with submitted(self._engine, prepared, detokenizer, trace_id) as generation:
            answer = self._stream if prepared.stream else self._whole
            return await answer(request, prepared, generation, shape)

    async def _prepare(self, request: web.Request, parse: Parse, request_id: str, arrival: float) -> Prepared:
        header = request.headers.get(TIMEOUT_HEADER)
        longest = self._engine.configuration.request_timeout
        with anyio.move_on_after(longest):
            raw = await read_body(request, longest)
            return await self._preparation.prepare(raw, parse, request_id, arrival, header)
        raise deadline_exceeded()

    async def _whole(
        self, request: web.Request, prepared: Prepared, generation: Generation, shape: Shape
    ) -> web.StreamResponse:
        response: web.Response | None = None
        with anyio.move_on_after(prepared.request.deadline - self._engine.clock()), suppress(ConnectionError):
            pieces = [piece async for piece in generation]
            text = "".join(piece.text for piece in pieces)
            params: dict[str, str] | UnsetType = UNSET
            if prepared.request.do_remote_decode:
                text, params = "", {"ticket": self._sealed(pieces[-1].ticket)}
            response = json_response(shape.whole(text, generation.outcome, generation.usage, params))
            # Here and not in aiohttp, so that the request is closed when its last byte is out.
            await response.prepare(request)
            await response.write_eof()
            return response
        if response is not None:  # its client is gone, or does not read
            abort_connection(request)
            return response
        generation.give_up("deadline")
        raise deadline_exceeded()

    async def _stream(
        self, request: web.Request, prepared: Prepared, generation: Generation, shape: Shape
    ) -> web.StreamResponse:
        events = EventStream(request)
        try:
            with anyio.move_on_after(prepared.request.deadline - self._engine.clock()):
                await send_events(events, prepared, generation, shape)
                return events.response
            generation.give_up("deadline")
            raise deadline_exceeded()
        except ConnectionError:
            return events.response
        except Exception as error:
            if not events.started:
                raise
            generation.give_up(f"the endpoint failed: {type(error).__name__}")
            with suppress(ConnectionError):
                await events.fail(client_view(error, request))
            return events.response

    def _sealed(self, ticket: Ticket | None) -> str:
        if ticket is None or self._engine.kv_secret is None:
            raise RequestRefused(RefusalReason.KV_SEND_FAILED, "this engine could not keep the prompt's KV blocks")
        return seal(ticket, self._engine.kv_secret)

    def _remember(self, request_id: str, engine_request_id: str) -> None:
        self._engine_ids[request_id] = engine_request_id
        if len(self._engine_ids) > REMEMBERED_IDS:
            self._engine_ids.popitem(last=False)


async def send_events(events: EventStream, prepared: Prepared, generation: Generation, shape: Shape) -> None:
    opened = False
    async for piece in generation:
        usage: Usage | UnsetType | None = UNSET
        if prepared.continuous_usage:
            usage = generation.usage
        elif prepared.include_usage:
            usage = None  # as OpenAI: null in all chunks but the last
        chunks = []
        if not opened and shape.chat:
            chunks.append(shape.opening(usage))
        if piece.text:
            chunks.append(shape.text_chunk(piece.text, usage))
        if piece.finish_reason is not None:
            chunks.append(shape.closing(piece.finish_reason, usage))
            if prepared.include_usage:
                chunks.append(shape.usage_chunk(generation.usage))
        await events.send(*chunks)
        opened = True
    await events.done()
