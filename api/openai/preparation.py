"""From a checked body to an `EngineRequest`: tokens, limits, hand-over. Everything that the endpoint itself refuses
is refused here, before the engine hears of the request.

Invariant: whoever unseals a ticket owes its release; a request that is refused here discharges that at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import msgspec

from actors.admission import check_capacity
from actors.messages.errors import RefusalReason
from actors.messages.request import EngineRequest, SamplingParams
from actors.messages.transfer import ReleaseTicket
from api.deadlines import header_seconds, shortest
from api.engine_handle import EngineHandle, served_model
from api.errors import ApiError, InvalidRequest
from api.openai.bodies import ChatBody, CompletionsBody, GenerationBody, StreamOptions, json_object
from api.openai.handover import FIELD, Handover, check_ticket, parse_handover
from api.openai.messages import template_messages
from api.openai.tokenizing import TextTooLong, Tokenizer

DEFAULT_COMPLETION_TOKENS = 16
RELEASE_SECONDS = 5.0  # for the message that lets a ticket go while a handler is being cancelled

Parse = Callable[[dict[str, Any]], ChatBody | CompletionsBody]


class Prepared(msgspec.Struct, frozen=True):
    request: EngineRequest
    chat: bool
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool


class Preparation:
    def __init__(self, engine: EngineHandle, tokenizer: Tokenizer) -> None:
        self._engine, self._tokenizer = engine, tokenizer

    async def prepare(
        self, raw: bytes, parse: Parse, request_id: str, arrival: float, header_timeout: str | None
    ) -> Prepared:
        """Raises InvalidRequest, and ApiError 404 for another model."""
        fields = json_object(raw)
        handover = self._handover(fields.get(FIELD))
        try:
            return await self._prepare(parse(fields), handover, request_id, arrival, header_timeout)
        except BaseException:
            if handover.ticket is not None:
                with anyio.move_on_after(RELEASE_SECONDS, shield=True):
                    await self._engine.admission.tell(ReleaseTicket(request_id, handover.ticket))
            raise

    def _handover(self, params: Any) -> Handover:
        """Before anything else is looked at: whatever is wrong beside it, a ticket must be released."""
        if not isinstance(params, dict):
            return Handover()
        return parse_handover(params, self._engine.configuration.role, self._engine.kv_secret)

    async def _prepare(
        self,
        body: ChatBody | CompletionsBody,
        handover: Handover,
        request_id: str,
        arrival: float,
        header_timeout: str | None,
    ) -> Prepared:
        engine = self._engine
        check_model(engine, body.model)
        if body.priority and engine.configuration.policy != "priority":
            raise InvalidRequest("'priority' needs an engine that runs with --policy priority", "priority")
        if handover.do_remote_decode and body.stream:
            raise InvalidRequest("'stream' must be false with do_remote_decode", "stream")
        timeout = shortest(body.timeout, header_seconds(header_timeout), engine.configuration.request_timeout)
        prompt = await self._prompt(body)
        max_tokens = self._max_tokens(body, len(prompt))
        min_tokens = body.min_tokens or 0
        if min_tokens > max_tokens:
            raise InvalidRequest(
                f"'min_tokens' {min_tokens} is more than the {max_tokens} tokens of max_tokens", "min_tokens"
            )
        if handover.ticket is not None:
            check_ticket(handover.ticket, prompt)
        if handover.do_remote_decode:
            check_capacity(len(prompt), max_tokens, engine.configuration.block_size, engine.capacity_blocks)
            # One token proves that the prompt is computed; it is dropped. How the text ends is decode's business.
            max_tokens, min_tokens = 1, 0
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=self._sampling(body),
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            eos_token_ids=() if body.ignore_eos else engine.description.eos_token_ids,
            priority=body.priority or 0,
            arrival=arrival,
            deadline=arrival + timeout,
            do_remote_decode=handover.do_remote_decode,
            ticket=handover.ticket,
        )
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        options = body.stream_options or StreamOptions()
        return Prepared(
            request=request,
            chat=isinstance(body, ChatBody),
            stop=() if handover.do_remote_decode else stop,
            stream=bool(body.stream),
            include_usage=bool(options.include_usage),
            continuous_usage=bool(options.continuous_usage_stats),
        )

    async def _prompt(self, body: ChatBody | CompletionsBody) -> tuple[int, ...]:
        limit = self._engine.max_model_len
        try:
            return await self._token_ids(body, limit)
        except TextTooLong as error:
            raise _beyond_context(
                f"the context holds {limit} tokens, the prompt has at least {error.least_tokens}",
                "messages" if isinstance(body, ChatBody) else "prompt",
            ) from None

    async def _token_ids(self, body: ChatBody | CompletionsBody, limit: int) -> tuple[int, ...]:
        if isinstance(body, ChatBody):
            return await self._tokenizer.encode_messages(template_messages(body.messages), limit=limit)
        prompt = _one_prompt(body.prompt)
        if isinstance(prompt, str):
            token_ids = await self._tokenizer.encode_prompt(prompt, limit=limit)
        else:
            token_ids = _checked_ids(prompt, self._tokenizer.vocab_size)
        if not token_ids:
            raise InvalidRequest("'prompt' is empty", "prompt")
        return token_ids

    def _max_tokens(self, body: ChatBody | CompletionsBody, num_prompt: int) -> int:
        limit, chat = self._engine.max_model_len, isinstance(body, ChatBody)
        field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if num_prompt >= limit:
            asked, field = asked or 1, "messages" if chat else "prompt"
        if asked is None:
            asked = self._rest_of_the_context(num_prompt) if chat else DEFAULT_COMPLETION_TOKENS
        if num_prompt + asked > limit:
            raise _beyond_context(
                f"the context holds {limit} tokens, but the prompt has {num_prompt} and up to {asked} are asked for: "
                f"{num_prompt + asked} together",
                field,
            )
        return asked

    def _rest_of_the_context(self, num_prompt: int) -> int:
        """Tokens; no more than a pool smaller than the context can hold beside the prompt."""
        engine = self._engine
        in_the_pool = engine.capacity_blocks * engine.configuration.block_size + 1 - num_prompt
        return min(engine.max_model_len - num_prompt, max(in_the_pool, 1))

    def _sampling(self, body: GenerationBody) -> SamplingParams:
        temperature = 1.0 if body.temperature is None else body.temperature
        seed = self._engine.new_seed() if body.seed is None and temperature > 0 else body.seed
        top_k = min(body.top_k or -1, self._tokenizer.vocab_size)
        return SamplingParams(temperature, 1.0 if body.top_p is None else body.top_p, top_k, seed)


def check_model(engine: EngineHandle, model: str) -> None:
    if model != served_model(engine):
        raise ApiError(
            404,
            f"there is no model {model!r} here, only {served_model(engine)!r}",
            code="model_not_found",
            param="model",
        )


def _beyond_context(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(message, param, RefusalReason.CONTEXT_LENGTH_EXCEEDED.value)


def _one_prompt(prompt: str | list[Any]) -> str | list[Any]:
    """Text, or token ids; a list of prompts has to have one."""
    if isinstance(prompt, str) or not prompt or not isinstance(prompt[0], (str, list)):
        return prompt
    if len(prompt) > 1:
        raise InvalidRequest(
            f"'prompt': {len(prompt)} prompts in one request are not supported yet, send one each", "prompt"
        )
    return prompt[0]


def _checked_ids(prompt: list[Any], vocab_size: int) -> tuple[int, ...]:
    try:
        token_ids = tuple(msgspec.convert(prompt, list[int]))
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"'prompt' must be text or token ids: {error}", "prompt", "invalid_type") from None
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"'prompt': token id {token_id} is outside the vocabulary of {vocab_size} tokens", "prompt"
            )
    return token_ids
