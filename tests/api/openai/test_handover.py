"""The two legs of a hand-over at an engine's door: what it is asked, what comes back, and who owes a release."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import pytest

from actors.messages.admission import SubmitRequest
from actors.messages.model import ModelDescription
from actors.messages.transfer import ReleaseTicket
from api.openai.tokenizing import Tokenizer
from connectors.ticket import seal, unseal
from tests.api.openai.scripted import MODEL, SECRET, Script, closings, serving, ticket_for

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPT = (100, 200, 300, 400)
# What vllm-router sends to its prefill server beside the client's fields.
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


async def test_prefill(description: ModelDescription) -> None:
    """How the text ends is decode's business: one token, no minimum, no stop string. It is not part of the answer."""
    ticket = ticket_for(PROMPT)
    body = {
        "model": MODEL,
        "prompt": list(PROMPT),
        "max_tokens": 40,
        "min_tokens": 30,
        "stop": ["a", "e"],
        "stream": False,
        "stream_options": {"include_usage": True},
        "kv_transfer_params": REMOTE_DECODE,
    }
    for role in ("prefill", "both"):
        async with serving(description, role=role) as server:
            server.admission.script = Script(((5000,),), ticket=ticket)
            status, answer = await server.post(TEXT, body)
            assert status == 200
            request = server.admission.request
        assert (request.do_remote_decode, request.max_tokens, request.min_tokens) == (True, 1, 0)
        assert request.prompt_token_ids == PROMPT
        assert list(answer["kv_transfer_params"]) == ["ticket"]
        assert unseal(answer["kv_transfer_params"]["ticket"], SECRET) == ticket
        assert answer["choices"] == [{"text": "", "finish_reason": "length", "index": 0, "logprobs": None}]
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (4, 0)
        assert await closings(server.admission) == [("closed", "length")]


async def test_prefill_of_a_chat(description: ModelDescription) -> None:
    async with serving(description, role="prefill") as server:
        server.admission.script = Script(((5000,),), ticket=ticket_for(PROMPT))
        messages = [{"role": "user", "content": "Hello"}]
        body = {"model": MODEL, "messages": messages, "kv_transfer_params": {"do_remote_decode": True}}
        status, answer = await server.post(CHAT, body)
    assert status == 200
    assert answer["choices"][0]["message"]["content"] == ""
    assert unseal(answer["kv_transfer_params"]["ticket"], SECRET) == ticket_for(PROMPT)


async def test_prefill_validates_as_decode_would(description: ModelDescription) -> None:
    async with serving(description, role="prefill", max_model_len=100) as server:
        for fields, param in (({"max_tokens": 97}, "max_tokens"), ({"min_tokens": 17}, "min_tokens"), ({"n": 2}, "n")):
            body = {"model": MODEL, "prompt": list(PROMPT), "kv_transfer_params": REMOTE_DECODE, **fields}
            status, answer = await server.post(TEXT, body)
            assert (status, answer["error"]["param"]) == (400, param)
        assert server.admission.messages == []


async def test_prefill_refuses_what_decode_could_never_hold(description: ModelDescription) -> None:
    async with serving(description, role="prefill") as server:
        server.engine.capacity_blocks = 2  # of 16 tokens
        body = {"model": MODEL, "prompt": list(PROMPT), "kv_transfer_params": REMOTE_DECODE, "max_tokens": 40}
        status, answer = await server.post(TEXT, body)
        assert (status, answer["error"]["code"]) == (400, "exceeds_kv_capacity")
        assert server.admission.messages == []


async def test_a_chat_without_max_tokens_asks_for_no_more_than_the_pool_holds(description: ModelDescription) -> None:
    async with serving(description, role="both") as server:
        server.engine.capacity_blocks = 10  # 160 tokens; the context has 8,192
        messages = [{"role": "user", "content": "Hello"}]
        await server.post(CHAT, {"model": MODEL, "messages": messages})
        request = server.admission.request
        assert len(request.prompt_token_ids) + request.max_tokens - 1 == 160


async def test_prefill_that_could_keep_no_blocks(description: ModelDescription) -> None:
    async with serving(description, role="prefill") as server:
        server.admission.script = Script(((5000,),))
        body = {"model": MODEL, "prompt": list(PROMPT), "kv_transfer_params": REMOTE_DECODE}
        status, answer = await server.post(TEXT, body)
        assert (status, answer["error"]["code"]) == (503, "kv_send_failed")


async def test_decode(description: ModelDescription) -> None:
    for role in ("decode", "both"):
        for num_tokens in (1, 3, 4):
            ticket = ticket_for(PROMPT[:num_tokens])
            body = {
                "model": MODEL,
                "prompt": list(PROMPT),
                "max_tokens": 5,
                "kv_transfer_params": {"ticket": seal(ticket, SECRET)},
            }
            async with serving(description, role=role) as server:
                status, answer = await server.post(TEXT, body)
                assert (status, "kv_transfer_params" in answer) == (200, False)
                assert server.admission.request.ticket == ticket
                assert server.admission.request.max_tokens == 5
                # From the submission on the engine owes the release.
                assert server.admission.of(ReleaseTicket) == []


async def test_a_ticket_that_is_not_for_this_prompt(description: ModelDescription) -> None:
    ours = seal(ticket_for(PROMPT), SECRET)
    cases: dict[str, tuple[str, Any]] = {
        "another secret": (seal(ticket_for(PROMPT), b"another secret of 32 bytes......"), False),
        "one character changed": (ours[:50] + ("A" if ours[50] != "A" else "B") + ours[51:], False),
        "another prompt": (seal(ticket_for((100, 200, 300, 401)), SECRET), True),
        "a longer prompt": (seal(ticket_for((*PROMPT, 500)), SECRET), True),
        "no tokens": (seal(ticket_for(()), SECRET), True),
        "another digest": (seal(ticket_for(PROMPT, prompt_digest=b"x" * 16), SECRET), True),
    }
    async with serving(description, role="decode") as server:
        for case, (sealed, genuine) in cases.items():
            server.admission.messages.clear()
            body = {"model": MODEL, "prompt": list(PROMPT), "kv_transfer_params": {"ticket": sealed}}
            status, answer = await server.post(TEXT, body)
            assert (status, answer["error"]["param"]) == (400, "kv_transfer_params.ticket"), case
            # A genuine ticket owes its release from the door on.
            assert [type(message) for message in server.admission.messages] == [ReleaseTicket] * genuine, case


async def test_a_refused_request_releases_its_ticket_once(description: ModelDescription) -> None:
    ticket = ticket_for(PROMPT)
    body = {"model": MODEL, "prompt": list(PROMPT), "kv_transfer_params": {"ticket": seal(ticket, SECRET)}}
    async with serving(description, role="decode") as server:
        for fields, status in (
            ({"max_tokens": 10**6}, 400),
            ({"model": "other"}, 404),
            ({"priority": 3}, 400),
            # Not only what is found behind the ticket.
            ({"temperature": 7}, 400),
            ({"unknown": 1}, 400),
            ({"prompt": ["a", "b"]}, 400),
        ):
            server.admission.messages.clear()
            assert (await server.post(TEXT, {**body, **fields}))[0] == status
            (release,) = server.admission.messages
            assert isinstance(release, ReleaseTicket)
            assert release.ticket == ticket
        server.admission.messages.clear()
        data = msgspec.json.encode(body)
        async with server.http.post(server.url + TEXT, data=data, headers={"X-Request-Timeout": "x"}) as response:
            assert response.status == 400
        assert [type(message) for message in server.admission.messages] == [ReleaseTicket]
        assert server.admission.of(SubmitRequest) == []


async def test_a_ticket_is_released_when_its_prompt_takes_too_long_to_tokenise(
    description: ModelDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def for_ever(*_: Any, **__: Any) -> None:
        await anyio.sleep_forever()

    monkeypatch.setattr(Tokenizer, "encode_prompt", for_ever)
    body = {"model": MODEL, "prompt": "x", "kv_transfer_params": {"ticket": seal(ticket_for(PROMPT), SECRET)}}
    async with serving(description, role="decode", request_timeout=0.2) as server:
        status, answer = await server.post(TEXT, body)
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
        assert [type(message) for message in server.admission.messages] == [ReleaseTicket]
        assert server.metric("kvyard_requests_total", outcome="refused") == 1
