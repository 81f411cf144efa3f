"""A real endpoint on a real port, before an AdmissionActor (a real actor of the kernel) that follows a script."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import aiohttp
import aiohttp.web
import anyio
import msgspec
import tokenizers

from actors.configuration import EngineConfiguration
from actors.kernel.actor import Actor
from actors.kernel.address import Address
from actors.kernel.reply import Reply
from actors.kernel.system import ActorSystem
from actors.messages.admission import (
    AbortRequest,
    BlocksReport,
    GrantReport,
    ReportBlocks,
    RequestStory,
    ResponseClosed,
    StoryOf,
    SubmitRequest,
)
from actors.messages.control import PauseReport, PauseScheduler, PrefixCacheReport, ResetPrefixCache, ResumeScheduler
from actors.messages.errors import RefusalReason, RequestRefused
from actors.messages.lease import Ticket, prompt_digest
from actors.messages.model import ModelDescription
from actors.messages.request import EngineRequest, FinishReason, RequestOutput, StoryInterval
from actors.messages.transfer import ReleaseTicket
from actors.output_stream import OutputStream
from api.engine_handle import Health
from api.metrics import EngineMetrics
from api.openai.app import make_app
from api.openai.tokenizing import Tokenizer
from api.serving import serve

MODEL = "smollm2-135m-instruct"
NOW = 1_700_000_000.5  # seconds since 1970, of every endpoint here
SECRET = b"0123456789abcdef0123456789abcdef"
STORY = RequestStory(
    "known", True, (StoryInterval("waiting", 10.0, 10.5, "budget"), StoryInterval("running", 10.5, 12.0))
)
BLOCKS = BlocksReport(10, 7, 3, 0, 0, 0, (GrantReport("known", 1, "held", 3, 0.5, "running"),))


@dataclass
class Script:
    """What happens to each accepted request: `outputs`, one tuple of token ids each, then the model's end token."""

    outputs: tuple[tuple[int, ...], ...] = ()
    refusal: RequestRefused | None = None
    pause_after: int | None = None  # outputs; then wait for `go_on`, or for ever
    error: tuple[RefusalReason, str] | None = None  # instead of the end
    given_up: bool = False  # the engine aborts it of its own accord
    num_cached_tokens: int = 0
    ticket: Ticket | None = None
    go_on: anyio.Event = field(default_factory=anyio.Event)


class ScriptedAdmission(Actor[Any]):
    def __init__(self, end_token: int) -> None:
        super().__init__("admission")
        self.script = Script()
        self.script_of: Callable[[EngineRequest], Script] = lambda _: self.script
        self.messages: list[Any] = []
        self.reports: list[PauseReport | PrefixCacheReport] = []  # for what is under /admin; none left: no answer
        self._unanswered: list[Reply] = []
        self._end_token = end_token
        self._changed = anyio.Event()

    async def receive(self, message: Any, reply: Reply) -> None:
        self.messages.append(message)
        match message:
            case SubmitRequest():
                self._submit(message.request, reply)
            case StoryOf():
                reply.send(STORY if message.request_id == STORY.request_id else None)
            case ReportBlocks():
                reply.send(BLOCKS)
            case PauseScheduler() | ResumeScheduler() | ResetPrefixCache() if self.reports:
                reply.send(self.reports.pop(0))
            case PauseScheduler() | ResumeScheduler() | ResetPrefixCache():
                self._unanswered.append(reply)
        self._changed.set()

    def _submit(self, request: EngineRequest, reply: Reply) -> None:
        script = self.script_of(request)
        if script.refusal is not None:
            reply.fail(script.refusal)
            return
        stream = OutputStream(request.request_id, 4096)
        reply.send(stream)
        self.tasks.start_soon(self._emit, request, script, stream)

    async def _emit(self, request: EngineRequest, script: Script, stream: OutputStream) -> None:
        room = request.max_tokens
        for index, token_ids in enumerate(script.outputs):
            if script.pause_after == index:
                await script.go_on.wait()
            kept = token_ids[:room]
            room -= len(kept)
            finish = FinishReason.LENGTH if room == 0 else None
            stream.put(
                RequestOutput(
                    request.request_id,
                    kept,
                    finish,
                    num_cached_tokens=script.num_cached_tokens if index == 0 else 0,
                    ticket=script.ticket if finish else None,
                )
            )
            if finish:
                return
            await anyio.lowlevel.checkpoint()
        if script.pause_after == len(script.outputs):
            await script.go_on.wait()
        if script.error is not None:
            stream.fail(*script.error)
        elif script.given_up:
            stream.put(RequestOutput(request.request_id, (), FinishReason.ABORT))
        else:
            end = self._end_token
            stream.put(RequestOutput(request.request_id, (end,), FinishReason.STOP, stop_token_id=end))

    async def wait_for(self, kind: type[Any], count: int = 1) -> list[Any]:
        with anyio.fail_after(10):
            while len(found := self.of(kind)) < count:
                self._changed = anyio.Event()
                await self._changed.wait()
        return found

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]

    @property
    def request(self) -> EngineRequest:
        """The one that was submitted."""
        (submitted,) = self.of(SubmitRequest)
        request: EngineRequest = submitted.request
        return request


@dataclass
class ScriptedEngine:
    configuration: EngineConfiguration
    description: ModelDescription
    admission: Address[Any]
    max_model_len: int = 8192
    engine_id: str = "decode-0"
    epoch: int = 7
    worker_pids: tuple[int, ...] = (4242,)
    kv_secret: bytes | None = SECRET
    transport: str = "tcp"
    metrics: EngineMetrics = field(default_factory=lambda: EngineMetrics(engine_id="decode-0"))
    verdict: Health = field(default_factory=lambda: Health(healthy=True))
    peers: dict[str, str] = field(default_factory=dict)
    capacity_blocks: int = 1 << 20
    ids: Any = field(default_factory=lambda: itertools.count(1))

    def clock(self) -> float:
        return time.monotonic()

    def new_id(self) -> str:
        return f"{next(self.ids):032x}"

    def new_seed(self) -> int:
        return 99

    def health(self) -> Health:
        return self.verdict

    def incompatible_peers(self) -> Mapping[str, str]:
        return self.peers


@dataclass
class Server:
    engine: ScriptedEngine
    admission: ScriptedAdmission
    system: ActorSystem
    url: str
    http: aiohttp.ClientSession
    router: aiohttp.web.UrlDispatcher

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        async with self.http.post(self.url + path, data=data, headers=headers) as response:
            return response.status, msgspec.json.decode(await response.read())

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self.http.get(self.url + path, headers=headers) as response:
            return response.status, msgspec.json.decode(await response.read())

    def metric(self, name: str, **labels: str) -> float | None:
        return self.engine.metrics.registry.get_sample_value(name, labels)


@functools.cache
def tokenizer_of(description: ModelDescription) -> Tokenizer:
    return Tokenizer(description, lambda: datetime.fromtimestamp(NOW))


@asynccontextmanager
async def serving(
    description: ModelDescription, *, max_model_len: int = 8192, kv_secret: bytes | None = SECRET, **settings: Any
) -> AsyncIterator[Server]:
    async with ActorSystem() as system:
        admission = ScriptedAdmission(description.eos_token_ids[0])
        address = await system.start(admission)
        configuration = msgspec.convert(settings, EngineConfiguration)
        engine = ScriptedEngine(configuration, description, address, max_model_len, kv_secret=kv_secret)
        app = make_app(engine, lambda: NOW, tokenizer_of(description))
        runner, port = await serve(app, "127.0.0.1", 0)
        try:
            async with aiohttp.ClientSession() as http:
                yield Server(engine, admission, system, f"http://127.0.0.1:{port}", http, app.router)
        finally:
            await runner.cleanup()


def events(raw: bytes) -> list[Any]:
    """The data of each server-sent event; "[DONE]" as it is."""
    lines = raw.decode().split("\n\n")
    assert lines.pop() == "", "the last event ends with an empty line"
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else msgspec.json.decode(line[6:]) for line in lines]


def one_by_one(tokenizer: tokenizers.Tokenizer, text: str) -> tuple[tuple[int, ...], ...]:
    """The text's tokens, one per output."""
    return tuple((token_id,) for token_id in tokenizer.encode(text, add_special_tokens=False).ids)


def ticket_for(prompt: tuple[int, ...], **changes: Any) -> Ticket:
    ticket = Ticket("prefill-0", 3, "127.0.0.1", 7001, 5, b"c" * 16, len(prompt), prompt_digest(prompt))
    return msgspec.structs.replace(ticket, **changes)


async def closings(admission: ScriptedAdmission, count: int = 1) -> list[tuple[str, ...]]:
    """What was told of requests after their submission, without their ids, once `count` of them are closed.

    An answer's reader may be quicker than the last words of its handler.
    """
    await admission.wait_for(ResponseClosed, count)
    told = []
    for message in admission.messages:
        match message:
            case AbortRequest():
                told.append(("abort", message.reason))
            case ResponseClosed():
                told.append(("closed", message.outcome))
            case ReleaseTicket():
                told.append(("released",))
    return told
