"""When a token is a request's last one."""

from __future__ import annotations

from actors.messages.request import FinishReason
from actors.scheduling.request import SchedulerRequest


def check_stop(request: SchedulerRequest, max_model_len: int) -> tuple[FinishReason, int | None] | None:
    """After its newest token: (reason, stop token id or None), or None while it goes on.

    EOS before stop ids before length. `min_tokens` holds back the first two only: a request without room for another
    token ends, whatever it asked for.
    """
    num_outputs = request.num_output_tokens
    if num_outputs >= request.min_tokens and request.stop_ids:
        token = request.tokens[-1]
        if token in request.stop_ids:
            return FinishReason.STOP, None if token in request.engine_request.eos_token_ids else token
    if num_outputs >= request.max_tokens or len(request.tokens) >= max_model_len:
        return FinishReason.LENGTH, None
    return None
