"""Every knob, once: name, type, bound, unit, default. Flags and `--help` are made from these fields (tools/flags.py).

The Structs are frozen and validated by `msgspec.convert`; whoever needs a setting is handed the Struct.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Role = Literal["both", "prefill", "decode"]
Transport = Literal["auto", "nixl", "tcp"]
DType = Literal["bfloat16", "float32"]
KVDType = Literal["auto", "int8"]
Policy = Literal["fcfs", "priority"]
LoadFailurePolicy = Literal["recompute", "fail"]
Drafter = Literal["ngram", "draft_model", "eagle"]

Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Text = Annotated[str, Meta(min_length=1)]
Seconds = Annotated[float, Meta(gt=0)]
Port = Annotated[int, Meta(ge=0, le=65535)]


class SchedulerConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """What the pure core needs. The defaults are those of the scenario format; an engine sets its own."""

    usable_blocks: Count = 10_000
    block_size: Count = 16
    max_num_seqs: Count = 16
    max_num_batched_tokens: Count = 8192
    max_model_len: Count = 8192
    policy: Policy = "fcfs"
    prefix_caching: bool = False
    chunked_prefill: bool = True
    long_prefill_token_threshold: Natural = 0  # tokens; 0 = off
    num_spec_tokens: Natural = 0
    drafter: Drafter = "ngram"  # who makes the drafts
    async_scheduling: bool = False
    reserve_full_sequence: bool = False
    watermark: float = 0.0  # fraction of the blocks
    max_loras: Natural = 0  # 0 = no cap
    encoder_budget: Natural = 0  # tokens per step
    encoder_cache: Natural = 0  # tokens
    disable_chunked_mm_input: bool = False  # a step computes an encoder input as a whole, if it fits behind others
    kv_load_failure_policy: LoadFailurePolicy = "fail"
    kv_connector: bool = False
    load_timeout_s: Seconds = 30.0
    kv_events: bool = False  # tell what the prefix cache stores and forgets: whoever sets it takes them
    # Rules in which the reference is worse than need be. The defaults are its own, an engine sets ROBUST_RULES.
    fence_frees: bool = False  # blocks that a dispatched step still touches come back with its result
    standstill_patience: Natural = 100  # schedule()s in a row that bring no token before waiting requests are reordered
    forget_uncomputed: bool = False  # a victim's blocks that its step was to compute are not found in the prefix cache
    trim_padding: bool = False  # a row has no more empty drafts than its scheduled tokens leave room for
    pass_over_self_victim: bool = False  # a request that preempted itself does not end the running pass for others
    readmit_while_pausing: bool = False  # pause "new" admits whoever ran already and was preempted: it runs to its end

    @property
    def num_lookahead_tokens(self) -> int:
        """Slots behind a row's tokens: a drafter that is a model writes the KV of its proposals there."""
        return 0 if self.drafter == "ngram" else self.num_spec_tokens

    @property
    def uses_eagle(self) -> bool:
        """Its drafter reads the target's hidden states, and the embedding of one token more than the target."""
        return self.drafter == "eagle" and self.num_spec_tokens > 0


ROBUST_RULES: dict[str, Any] = {
    "fence_frees": True,
    "standstill_patience": 0,
    "forget_uncomputed": True,
    "trim_padding": True,
    "pass_over_self_victim": True,
    "readmit_while_pausing": True,
}


class EngineConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """`kvyard serve`."""

    model: Annotated[
        str, Meta(description="model: an id the model store knows, a .gguf file, or a Hugging Face folder")
    ] = "smollm2-135m-instruct"
    served_model_name: Annotated[Text | None, Meta(description="the id that clients use; default: the model's own")] = (
        None
    )
    role: Annotated[Role, Meta(description="what this engine does of a request")] = "both"
    host: Annotated[str, Meta(description="address the HTTP endpoint listens on")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="HTTP port; 0 picks a free one")] = 8001
    engine_id: Annotated[str | None, Meta(description="unique name in the deployment; default: role and port")] = None
    epoch: Annotated[int, Meta(ge=0, description="rises with each restart of an engine id; 0: made from the clock")] = 0
    api_key: Annotated[
        Text | None,
        Meta(description="key that clients must send; also KVYARD_API_KEY", extra={"env": "KVYARD_API_KEY"}),
    ] = None
    kv_secret_file: Annotated[
        str | None,
        Meta(description="file with the deployment's secret, the same for all engines: it seals the tickets"),
    ] = None
    kv_host: Annotated[
        str | None, Meta(description="address other engines reach this one's KV listener at; default: --host")
    ] = None
    transport: Annotated[Transport, Meta(description="how KV blocks travel; auto: nixl where it can be imported")] = (
        "auto"
    )
    device: Annotated[Literal["cpu", "cuda"], Meta(description="where the model runs")] = "cpu"
    dtype: Annotated[DType, Meta(description="of weights, activations and, by default, KV cache")] = "bfloat16"
    kv_dtype: Annotated[
        KVDType, Meta(description="of the KV cache; auto: --dtype; int8 holds nearly twice the tokens of bfloat16")
    ] = "auto"
    weights: Annotated[
        Literal["dense", "stored"],
        Meta(
            description="dense: expanded to --dtype; stored: quantised matrices of a GGUF are computed on as they are"
        ),
    ] = "dense"
    kv_memory: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="size of the KV pool; default: 1GiB, or one full context if that is more",
            extra={"unit": "bytes"},
        ),
    ] = None
    block_size: Annotated[Count, Meta(description="tokens per KV block")] = 16
    max_model_len: Annotated[int, Meta(ge=0, description="longest sequence, tokens; 0: the model's context")] = 0
    max_num_batched_tokens: Annotated[Count, Meta(description="token budget of one step")] = 2048
    max_num_seqs: Annotated[Count, Meta(description="most requests running at once")] = 128
    long_prefill_token_threshold: Annotated[
        int, Meta(ge=0, description="most tokens of one request in one step; 0 = off")
    ] = 0
    async_depth: Annotated[
        int,
        Meta(ge=1, le=8, description="most steps in flight; 1: a step is planned when the one before has returned"),
    ] = 2
    policy: Annotated[Policy, Meta(description="order of the waiting queue")] = "fcfs"
    prefix_caching: Annotated[bool, Meta(description="reuse KV blocks of equal prompt prefixes")] = True
    reserve_full_sequence: Annotated[bool, Meta(description="admit a request only if its whole prompt fits")] = True
    watermark: Annotated[float, Meta(ge=0, lt=1, description="share of blocks kept free at admission")] = 0.0
    kv_load_failure_policy: Annotated[
        LoadFailurePolicy, Meta(description="when a prompt's KV blocks do not arrive")
    ] = "recompute"
    kv_load_timeout: Annotated[Seconds, Meta(description="longest load of KV blocks", extra={"unit": "seconds"})] = 30.0
    lease: Annotated[
        Seconds, Meta(description="how long a prompt's blocks are kept for a reader", extra={"unit": "seconds"})
    ] = 30.0
    lease_renewal: Annotated[
        Seconds, Meta(description="how often a waiting reader renews its lease", extra={"unit": "seconds"})
    ] = 5.0
    max_quarantined_share: Annotated[
        float, Meta(gt=0, le=1, description="share of the pool in quarantine beyond which the engine is unhealthy")
    ] = 0.5
    max_waiting_requests: Annotated[Count, Meta(description="queue limit, requests; beyond it 429")] = 1024
    max_waiting_tokens: Annotated[Count, Meta(description="queue limit, prompt tokens; beyond it 429")] = 1_000_000
    max_body_bytes: Annotated[Count, Meta(description="largest HTTP body", extra={"unit": "bytes"})] = 8 << 20
    request_timeout: Annotated[
        Seconds, Meta(description="deadline of a request that sets none", extra={"unit": "seconds"})
    ] = 600.0
    drain_timeout: Annotated[
        Seconds, Meta(description="how long a shutdown waits for running requests", extra={"unit": "seconds"})
    ] = 10.0
    threads: Annotated[
        int, Meta(ge=0, description="threads of the forward pass; 0: this machine's cores, shared out by kvyard up")
    ] = 0
    step_log: Annotated[
        Text | None,
        Meta(
            description="file for every input and plan of the scheduler, see kvyard replay; with kvyard up a folder, "
            "ENGINE_ID.steplog in it"
        ),
    ] = None
    fault: Annotated[
        str | None,
        Meta(description="for tests: a fault to inject, such as 'corrupt:1' or 'drop:0.1,seed:7'", extra={"hidden": 1}),
    ] = None


class RouterConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """`kvyard router`."""

    prefill: Annotated[tuple[str, ...], Meta(description="URL of a prefill engine; repeat for more")] = ()
    decode: Annotated[tuple[str, ...], Meta(description="URL of a decode (or both) engine; repeat for more")] = ()
    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="HTTP port")] = 8000
    api_key: Annotated[
        Text | None,
        Meta(
            description="key that clients must send, and engines get; also KVYARD_API_KEY",
            extra={"env": "KVYARD_API_KEY"},
        ),
    ] = None
    max_body_bytes: Annotated[Count, Meta(description="largest HTTP body", extra={"unit": "bytes"})] = 8 << 20
    request_timeout: Annotated[
        Seconds, Meta(description="deadline of a request that sets none", extra={"unit": "seconds"})
    ] = 600.0
    probe_interval: Annotated[
        Seconds, Meta(description="how often each engine's health is asked", extra={"unit": "seconds"})
    ] = 1.0
    drain_timeout: Annotated[
        Seconds, Meta(description="how long a shutdown waits for running requests", extra={"unit": "seconds"})
    ] = 10.0


class UpConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """`kvyard up`: what differs from the engines' and the router's own settings. Other engine flags are passed on."""

    prefill: Annotated[int, Meta(ge=0, description="number of prefill engines")] = 1
    decode: Annotated[int, Meta(ge=1, description="number of decode engines; with --prefill 0 of role both")] = 1
    host: Annotated[str, Meta(description="address the router listens on")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="HTTP port of the router; the engines take free ones")] = 8000


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes of "1GiB", "512MiB", "2g" or "1048576". Raises ValueError that says what is accepted."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?)?b?\s*", text.lower())
    if match is None:
        raise ValueError(f"{text!r} is not a size: write bytes, or a number with KiB, MiB, GiB, KB, MB or GB")
    return int(float(match[1]) * _UNITS[match[2] or ""])
