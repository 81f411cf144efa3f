from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.kernel.frames import HEADER, MAX_BODY, FrameReader, Kind, ProtocolError, pack

frame_values = st.tuples(
    st.sampled_from(Kind),
    st.binary(max_size=255),
    st.integers(0, 2**64 - 1),
    st.one_of(st.binary(max_size=40), st.integers(0, 200_000).map(lambda size: b"\x5a" * size)),
)


def feed(reader: FrameReader, data: bytes) -> list[tuple[Kind, bytes, int, bytes]]:
    """All frames in `data`, received in as many pieces as the reader's room makes."""
    frames = []
    while data:
        room = reader.room()
        count = min(len(room), len(data))
        room[:count], data = data[:count], data[count:]
        reader.received(count)
        while (frame := reader.next_frame()) is not None:
            frames.append((frame.kind, frame.name, frame.number, bytes(frame.body)))
    return frames


@settings(max_examples=150, deadline=None)
@given(st.lists(frame_values, max_size=8), st.data())
def test_frames_come_out_whole_and_in_order_however_the_bytes_were_cut(
    sent: list[tuple[Kind, bytes, int, bytes]], data: st.DataObject
) -> None:
    wire = b"".join(pack(kind, name=name, number=number, body=body) for kind, name, number, body in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=10)))
    reader, received = FrameReader(), []
    for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        received += feed(reader, wire[start:end])
    assert received == sent


def test_the_layout_is_as_documented() -> None:
    assert pack(Kind.ASK, name=b"ab", number=258, body=b"\x90") == bytes.fromhex(
        "03000000 02 02 0201000000000000 6162 90"
    )


def test_the_buffer_shrinks_after_a_large_frame() -> None:
    reader = FrameReader()
    assert len(feed(reader, pack(Kind.TELL, name=b"a", body=bytes(10 << 20)))) == 1
    assert len(reader.room()) == 64 << 10


@pytest.mark.parametrize(
    "header",
    [
        HEADER.pack(10, 0, 1, 0),  # no such kind
        HEADER.pack(10, 99, 1, 0),
        HEADER.pack(3, Kind.TELL, 4, 0),  # the name longer than the frame
        HEADER.pack(MAX_BODY + 2, Kind.TELL, 1, 0),  # one byte too many
    ],
)
def test_what_cannot_be_a_frame_is_a_protocol_error(header: bytes) -> None:
    with pytest.raises(ProtocolError, match="no frame begins with"):
        feed(FrameReader(), header)


def test_a_body_has_a_largest_size() -> None:
    with pytest.raises(ValueError, match="67108865 bytes is too large for a link: at most 67108864"):
        pack(Kind.TELL, body=bytes(MAX_BODY + 1))
