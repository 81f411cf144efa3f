"""The official `openai` package against the endpoint: what it parses is what was meant."""

from __future__ import annotations

import anyio.to_thread
import openai
import pytest
import tokenizers

from actors.messages.errors import RefusalReason, RequestRefused
from actors.messages.model import ModelDescription
from tests.api.openai.scripted import MODEL, Script, Server, closings, one_by_one, serving

ANSWER = "The capital of France is Paris. — Voilà, 東京 🙂!"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
# The template's own text around the question (checked against Hugging Face in test_tokenizing.py): 37 tokens.
NUM_PROMPT = 37


def client(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0)


@pytest.fixture
def script(tokenizer: tokenizers.Tokenizer) -> Script:
    return Script(one_by_one(tokenizer, ANSWER), num_cached_tokens=16)


async def test_chat(description: ModelDescription, script: Script) -> None:
    async with serving(description) as server, client(server) as api:
        server.admission.script = script
        answer = await api.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", ANSWER, "stop")
    assert (answer.object, answer.model, answer.created) == ("chat.completion", MODEL, 1_700_000_000)
    assert answer.id == "chatcmpl-" + f"{2:032x}"  # the first id is the X-Request-ID
    assert answer.system_fingerprint == "fp_" + description.digest[:10]
    assert answer.usage is not None
    num_completion = len(script.outputs) + 1  # and the end token
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (NUM_PROMPT, num_completion)
    assert answer.usage.total_tokens == NUM_PROMPT + num_completion
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    assert await closings(server.admission) == [("closed", "stop")]


async def test_chat_streams(description: ModelDescription, script: Script) -> None:
    async with serving(description) as server, client(server) as api:
        server.admission.script = script
        stream = await api.chat.completions.create(
            model=MODEL, messages=QUESTION, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert stream.response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert stream.response.headers["cache-control"] == "no-cache"
    assert stream.response.headers["x-accel-buffering"] == "no"
    *text_chunks, last, usage = chunks
    assert text_chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.role for chunk in text_chunks[1:]] == [None] * (len(text_chunks) - 1)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in text_chunks) == ANSWER
    assert len(text_chunks) > 10, "it streams"
    assert {chunk.choices[0].finish_reason for chunk in text_chunks} == {None}
    assert (last.choices[0].finish_reason, last.choices[0].delta.content) == ("stop", None)
    assert {chunk.usage for chunk in chunks[:-1]} == {None}
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == len(script.outputs) + 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert await closings(server.admission) == [("closed", "stop")]


async def test_completions_of_every_form_of_prompt(
    description: ModelDescription, tokenizer: tokenizers.Tokenizer, script: Script
) -> None:
    prompt = "Once upon a time"
    ids = tokenizer.encode(prompt).ids
    for form in (prompt, [prompt], ids, [ids]):
        async with serving(description) as server, client(server) as api:
            server.admission.script = script
            answer = await api.completions.create(model=MODEL, prompt=form, max_tokens=5)
            assert server.admission.request.prompt_token_ids == tuple(ids)
        first_five = [token for output in script.outputs[:5] for token in output]
        assert answer.choices[0].text == tokenizer.decode(first_five)
        assert (answer.object, answer.choices[0].finish_reason) == ("text_completion", "length")
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 5)


async def test_completions_stream(description: ModelDescription, script: Script) -> None:
    async with serving(description) as server, client(server) as api:
        server.admission.script = script
        stream = await api.completions.create(model=MODEL, prompt="Hello", stream=True, max_tokens=100)
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]


async def test_the_synchronous_client(description: ModelDescription, script: Script) -> None:
    def talk(url: str) -> tuple[str | None, str]:
        with openai.OpenAI(base_url=url + "/v1", api_key="any", max_retries=0) as api:
            whole = api.chat.completions.create(model=MODEL, messages=QUESTION)
            stream = api.chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            assert [model.id for model in api.models.list()] == [MODEL]
            assert api.models.retrieve(MODEL).owned_by == "kvyard"
            return whole.choices[0].message.content, streamed

    async with serving(description) as server:
        server.admission.script = script
        assert await anyio.to_thread.run_sync(talk, server.url) == (ANSWER, ANSWER)


async def test_errors_are_the_classes_of_the_client(description: ModelDescription) -> None:
    async with serving(description, api_key="right") as server:
        wrong = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError) as unauthorised:
            await wrong.models.list()
        assert "Bearer" in unauthorised.value.message
        right = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="right", max_retries=0)
        with pytest.raises(openai.NotFoundError) as unknown:
            await right.chat.completions.create(model="gpt-5", messages=QUESTION)
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as invalid:
            await right.chat.completions.create(model=MODEL, messages=QUESTION, temperature=3)
        assert invalid.value.param == "temperature"
        server.admission.script = Script(refusal=RequestRefused(RefusalReason.QUEUE_FULL, "full", retry_after=2.1))
        with pytest.raises(openai.RateLimitError) as busy:
            await right.chat.completions.create(model=MODEL, messages=QUESTION)
        assert busy.value.response.headers["Retry-After"] == "3"  # whole seconds, never sooner than said


async def test_an_error_in_the_stream_raises_in_the_client(description: ModelDescription, script: Script) -> None:
    script.error = (RefusalReason.ENGINE_UNAVAILABLE, "the worker died")
    async with serving(description) as server, client(server) as api:
        server.admission.script = script
        stream = await api.chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
        texts: list[str] = []

        async def read() -> None:
            async for chunk in stream:
                texts.append(chunk.choices[0].delta.content or "")  # noqa: PERF401  (it raises in the middle)

        with pytest.raises(openai.APIError, match="the worker died"):
            await read()
    assert "".join(texts) == ANSWER
    assert await closings(server.admission) == [("closed", "error")]


async def test_fifty_streams_at_once(description: ModelDescription, tokenizer: tokenizers.Tokenizer) -> None:
    texts = {f"request {number}": f"Answer number {number}, 東京 🙂." for number in range(50)}

    async with serving(description) as server, client(server) as api:
        prompts = {tuple(tokenizer.encode(prompt).ids): text for prompt, text in texts.items()}
        server.admission.script_of = lambda request: Script(one_by_one(tokenizer, prompts[request.prompt_token_ids]))
        answers: dict[str, str] = {}

        async def ask(prompt: str) -> None:
            stream = await api.completions.create(model=MODEL, prompt=prompt, stream=True, max_tokens=100)
            answers[prompt] = "".join([chunk.choices[0].text async for chunk in stream])

        async with anyio.create_task_group() as tasks:
            for prompt in texts:
                tasks.start_soon(ask, prompt)
        assert answers == texts
        assert server.metric("kvyard_requests_total", outcome="stop") == 50
        assert server.metric("kvyard_time_to_first_token_seconds_count") == 50
