"""The stream as it is cut by the network: whatever the cuts, what has passed is whole events, in order, all of them."""

from __future__ import annotations

import pytest

from api.router.events import WholeEvents

DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error":{"code":"engine_unavailable"}}\n\n'


@pytest.mark.parametrize("last", [DONE, ERROR, DONE.replace(b"\n\n", b"\r\n\r\n"), b"data: 2\n\n"])
@pytest.mark.parametrize("blank", [b"\n\n", b"\r\n\r\n"])
def test_any_two_cuts(last: bytes, blank: bytes) -> None:
    stream = b"data: 1" + blank + b': a comment\ndata: {"text":"[DONE]"}' + blank + last
    for first in range(len(stream)):
        for second in range(first, len(stream)):
            events, passed = WholeEvents(), b""
            for chunk in (stream[:first], stream[first:second], stream[second:]):
                passed += events.feed(chunk)
                assert passed.endswith((b"\n\n", b"\r\n\r\n")) or not passed
                assert events.over == (passed == stream and last != b"data: 2\n\n")
            assert passed == stream


def test_half_an_event_is_held_back() -> None:
    events = WholeEvents()
    assert events.feed(b"data: 1\n\ndata: 2\n") == b"data: 1\n\n"
    assert events.rest == b"data: 2\n"
    assert events.feed(b"\n") == b"data: 2\n\n"
    assert (events.rest, events.over) == (b"", False)
