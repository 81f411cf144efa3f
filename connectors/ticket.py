"""The sealed ticket: what a client and a router carry from a prefill to a decode engine, and cannot alter.

    text = base64url( HMAC-SHA256(secret, payload) ‖ payload ),   payload = msgpack of `Ticket`

The seal proves that an engine of this deployment made the ticket; the capability inside it is what opens the lease.
Invariant: `unseal` returns only what `seal` made under the same secret, whatever text it is given.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from pathlib import Path

import msgspec

from actors.messages.errors import ConfigurationError, KvyardError
from actors.messages.lease import Ticket

MAX_SEALED_LENGTH = 4096  # characters; a real one has about 300
MIN_SECRET_BYTES = 16
_SEAL_BYTES = hashlib.sha256().digest_size
_CONTEXT = b"kvyard ticket 1\0"  # a seal made for something else under the same secret is not valid here
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Ticket).decode


class InvalidTicket(KvyardError):
    """The text is not a ticket that an engine of this deployment sealed."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"the ticket is not valid: {reason}")


def seal(ticket: Ticket, secret: bytes) -> str:
    payload = _encode(ticket)
    return base64.urlsafe_b64encode(_seal_of(payload, secret) + payload).rstrip(b"=").decode()


def unseal(text: str, secret: bytes) -> Ticket:
    """Raises InvalidTicket: malformed text, or sealed under another secret."""
    if len(text) > MAX_SEALED_LENGTH:
        raise InvalidTicket(f"longer than {MAX_SEALED_LENGTH} characters")
    try:
        raw = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise InvalidTicket("not base64") from error
    given, payload = raw[:_SEAL_BYTES], raw[_SEAL_BYTES:]
    if not hmac.compare_digest(given, _seal_of(payload, secret)):
        raise InvalidTicket("its seal is wrong; do all engines share one --kv-secret-file?")
    if base64.urlsafe_b64encode(raw).rstrip(b"=").decode() != text:
        raise InvalidTicket("not in its one spelling")
    try:
        return _decode(payload)
    except msgspec.MsgspecError as error:
        raise InvalidTicket("sealed by another version of kvyard") from error


def load_secret(path: str) -> bytes:
    """The deployment's secret from a file. Raises ConfigurationError when it cannot be read or is too short."""
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigurationError(f"--kv-secret-file {path}: {error.strerror}") from error
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigurationError(
            f"--kv-secret-file {path}: {len(secret)} bytes, at least {MIN_SECRET_BYTES} are needed; "
            "make one with `openssl rand -hex 32`"
        )
    return secret


def _seal_of(payload: bytes, secret: bytes) -> bytes:
    return hmac.digest(secret, _CONTEXT + payload, "sha256")
