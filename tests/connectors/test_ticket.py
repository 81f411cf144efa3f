"""A sealed ticket comes back whole; nothing else does."""

from __future__ import annotations

import base64
import hmac
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.messages.errors import ConfigurationError
from actors.messages.lease import Ticket
from connectors.ticket import InvalidTicket, load_secret, seal, unseal

SECRET = b"0123456789abcdef0123456789abcdef"
TICKET = Ticket(
    engine_id="prefill-0",
    epoch=3,
    host="127.0.0.1",
    port=4711,
    lease_id=17,
    capability=bytes(range(16)),
    num_tokens=1024,
    prompt_digest=b"0" * 16,
    transport="nixl",
)
SEALED = seal(TICKET, SECRET)
URL_SAFE = set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")


def test_it_comes_back_whole_and_is_compact_and_url_safe() -> None:
    assert unseal(SEALED, SECRET) == TICKET
    assert set(SEALED) <= URL_SAFE
    assert len(SEALED) < 300


@given(st.integers(0, len(SEALED) - 1), st.sampled_from(sorted(URL_SAFE | set("+/=. \n"))))
def test_no_character_can_be_altered(position: int, character: str) -> None:
    forged = SEALED[:position] + character + SEALED[position + 1 :]
    if forged != SEALED:
        with pytest.raises(InvalidTicket):
            unseal(forged, SECRET)


@given(st.text(max_size=400))
def test_any_other_text_is_invalid(text: str) -> None:
    with pytest.raises(InvalidTicket):
        unseal(text, SECRET)


@pytest.mark.parametrize("text", ["", SEALED[:-1], SEALED + "A", SEALED + "=", SEALED[1:], SEALED * 40, "é" * 80])
def test_cut_lengthened_and_foreign_texts_are_invalid(text: str) -> None:
    with pytest.raises(InvalidTicket):
        unseal(text, SECRET)


def test_another_secret_is_told_apart() -> None:
    with pytest.raises(InvalidTicket, match="--kv-secret-file"):
        unseal(SEALED, SECRET[:-1] + b"!")


def test_a_seal_over_the_bare_payload_is_not_a_ticket() -> None:
    """Whoever gets the deployment to seal other bytes under the same secret cannot pass them off as a ticket."""
    payload = msgspec.msgpack.encode(TICKET)
    forged = base64.urlsafe_b64encode(hmac.digest(SECRET, payload, "sha256") + payload).rstrip(b"=").decode()
    with pytest.raises(InvalidTicket):
        unseal(forged, SECRET)


def test_the_secret_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    assert load_secret(str(path)) == SECRET
    path.write_bytes(b"short\n")
    with pytest.raises(ConfigurationError, match="5 bytes, at least 16"):
        load_secret(str(path))
    with pytest.raises(ConfigurationError, match="No such file"):
        load_secret(str(tmp_path / "absent"))
