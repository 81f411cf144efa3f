"""An engine's stream of server-sent events, as far as the router has to understand it. Pure."""

from __future__ import annotations

LAST_EVENTS = (b"data: [DONE]", b'data: {"error":')


class WholeEvents:
    """Holds back the part of an SSE stream behind the last blank line, until its event is whole."""

    def __init__(self) -> None:
        self.rest = b""
        self.over = False  # the engine's last word has passed: nothing may follow it

    def feed(self, chunk: bytes) -> bytes:
        if not self.rest and chunk.endswith(b"\n\n"):  # whole events, as nearly always
            last = chunk[chunk.rfind(b"\n", 0, -2) + 1 :]
            if last[:1].isalpha():
                self.over |= last.startswith(LAST_EVENTS)
                return chunk
        data = self.rest + chunk
        end = max((data.rfind(blank) + len(blank) for blank in (b"\n\n", b"\r\n\r\n") if blank in data), default=0)
        self.rest = data[end:]
        self.over |= data[:end].rstrip().rpartition(b"\n")[2].startswith(LAST_EVENTS)
        return data[:end]
