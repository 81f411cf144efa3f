"""The hand-over between two engines: the ticket, and what the two TransferActors say to each other over TCP.

Times that cross a machine are durations in seconds, never points of a clock. Ids are compared whole.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from enum import StrEnum

import msgspec

PROTOCOL_VERSION = 1


class KVLayout(msgspec.Struct, frozen=True):
    """What both ends must agree on before a byte moves. `OpenLease` compares it field by field."""

    model_digest: str  # hex SHA-256 over the weights' identity, see the model store
    dtype: str  # "bfloat16" | "float32"
    block_size: int  # tokens per block
    num_layers: int
    num_kv_heads: int
    head_size: int
    rope_theta: float
    rope_scaling: str  # canonical JSON, "" for none
    order: str = "head,layer,kv,token,dim"  # inside a block, outermost first
    protocol_version: int = PROTOCOL_VERSION
    kv_dtype: str = "auto"  # "auto": `dtype`; "int8": with a bfloat16 scale for each vector, behind those of a head

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: all heads and layers, keys and values, in one contiguous span."""
        vectors = self.num_kv_heads * self.num_layers * 2 * self.block_size
        if self.kv_dtype == "int8":
            return vectors * (self.head_size + 2)
        return vectors * self.head_size * {"bfloat16": 2, "float32": 4}[self.dtype]

    def differences(self, other: KVLayout) -> list[str]:
        """`field: ours X, theirs Y` for every field that differs."""
        return [
            f"{name}: ours {getattr(self, name)!r}, theirs {getattr(other, name)!r}"
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(other, name)
        ]


class Ticket(msgspec.Struct, frozen=True):
    """A right to read the KV blocks of one prompt. Travels sealed (HMAC) through the router and the client's body."""

    engine_id: str
    epoch: int
    host: str  # of the prefill side's control listener
    port: int
    lease_id: int
    capability: bytes  # 16 random bytes; whoever has them may read and release
    num_tokens: int  # whose KV the blocks hold, from the prompt's start
    prompt_digest: bytes  # of the tokens that the blocks were computed from, see `prompt_digest`
    transport: str = "tcp"  # what the prefill side offers: "nixl" | "tcp"


def prompt_digest(token_ids: Sequence[int]) -> bytes:
    """16 bytes of BLAKE2b over the tokens as int32: a ticket serves the very prompt it was made for, and no other."""
    return hashlib.blake2b(array("i", token_ids).tobytes(), digest_size=16).digest()


class RefusedLease(StrEnum):
    EXPIRED = "expired"
    UNKNOWN = "unknown"
    INCOMPATIBLE = "incompatible"
    WRONG_EPOCH = "wrong_epoch"
    WRONG_CAPABILITY = "wrong_capability"
    OVERLOADED = "overloaded"


class OpenLease(msgspec.Struct, frozen=True, tag=True):
    engine_id: str  # whom the ticket names; a stranger at its address refuses
    epoch: int
    lease_id: int
    capability: bytes
    layout: KVLayout
    reader_engine_id: str
    transport: str  # "nixl" | "tcp": how the reader wants to READ


class LeaseOpened(msgspec.Struct, frozen=True, tag=True):
    lease_id: int
    block_ids: bytes  # int32 little-endian: blocks of the prefill pool, prompt order
    checksums: bytes  # uint64 little-endian, xxh3_64 of each block's bytes, same order
    remaining_s: float
    pool_address: int  # base address of the prefill pool, for one-sided READs
    agent_metadata: bytes  # NIXL agent metadata, b"" for tcp


class LeaseRefused(msgspec.Struct, frozen=True, tag=True):
    lease_id: int
    reason: RefusedLease
    detail: str  # both values of every field that differs, or what to do


class RenewLease(msgspec.Struct, frozen=True, tag=True):
    epoch: int
    lease_id: int
    capability: bytes


class LeaseRenewed(msgspec.Struct, frozen=True, tag=True):
    lease_id: int
    remaining_s: float  # 0: gone


class RenewLeases(msgspec.Struct, frozen=True, tag=True):
    """One heartbeat for all leases that a reader holds of this owner. Unknown ones are ignored."""

    epoch: int
    lease_ids: tuple[int, ...]
    capabilities: tuple[bytes, ...]  # same order


class LeasesRenewed(msgspec.Struct, frozen=True, tag=True):
    remaining_s: tuple[float, ...]  # in the order asked; 0: gone


class ReleaseLease(msgspec.Struct, frozen=True, tag=True):
    """The confirmation after the READ, or the refusal to read. The owner frees the blocks either way."""

    epoch: int
    lease_id: int
    capability: bytes


class ReleaseOutcome(StrEnum):
    GOOD = "good"
    EXPIRED = "expired"
    UNKNOWN = "unknown"


class LeaseReleased(msgspec.Struct, frozen=True, tag=True):
    lease_id: int
    outcome: ReleaseOutcome


class ReadBlocks(msgspec.Struct, frozen=True, tag=True):
    """tcp transport: send me these blocks. Answered by `BlocksFollow` and then the raw bytes."""

    epoch: int
    lease_id: int
    capability: bytes
    indexes: bytes  # int32 little-endian, positions in the lease's block list


class BlocksFollow(msgspec.Struct, frozen=True, tag=True):
    lease_id: int
    num_bytes: int  # raw bytes right behind this frame, blocks in the order asked


ControlRequest = OpenLease | RenewLease | RenewLeases | ReleaseLease | ReadBlocks
ControlReply = LeaseOpened | LeaseRefused | LeaseRenewed | LeasesRenewed | LeaseReleased | BlocksFollow
