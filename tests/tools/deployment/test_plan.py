"""The pure parts of `up`: what is started, when again, on which ports, and how its lines look."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from actors.configuration import EngineConfiguration, UpConfiguration
from actors.messages.errors import ConfigurationError
from tools.deployment.addresses import check_free, free_ports
from tools.deployment.log_relay import LONGEST_LINE, PrefixedLines, relay
from tools.deployment.plan import deployment_of, engine_roles, reachable, threads_share
from tools.deployment.process import folder_of_step_logs
from tools.deployment.restart import RestartPolicy


def test_names_and_roles() -> None:
    assert engine_roles(UpConfiguration(prefill=1, decode=2)) == [
        ("prefill-0", "prefill"),
        ("decode-0", "decode"),
        ("decode-1", "decode"),
    ]
    assert engine_roles(UpConfiguration(prefill=0, decode=1)) == [("both-0", "both")]


@pytest.mark.parametrize(
    ("threads", "cores", "engines", "share"), [(0, 2, 2, 1), (0, 8, 3, 2), (0, 1, 4, 1), (5, 2, 2, 5)]
)
def test_the_cores_are_shared_out_unless_told(threads: int, cores: int, engines: int, share: int) -> None:
    assert threads_share(threads, cores, engines) == share


def test_command_lines() -> None:
    engine = EngineConfiguration(dtype="float32", prefix_caching=False, api_key="hush", max_body_bytes=1000)
    deployment = deployment_of(
        UpConfiguration(port=9000, host="0.0.0.0"),
        engine,
        engine_ports=[11, 12],
        secret_file="/s",
        cores=4,
        command=["kvyard"],
    )
    prefill, decode = deployment.engines
    assert prefill.arguments(3) == [
        "kvyard", "serve", "--role=prefill", "--port=11", "--engine-id=prefill-0", "--kv-secret-file=/s",
        "--dtype=float32", "--no-prefix-caching", "--max-body-bytes=66536", "--threads=2", "--epoch=3",
    ]  # fmt: skip
    assert decode.url == "http://127.0.0.1:12"
    assert deployment.router.arguments(7) == [
        "kvyard", "router", "--prefill=http://127.0.0.1:11", "--decode=http://127.0.0.1:12", "--host=0.0.0.0",
        "--port=9000", "--max-body-bytes=1000",
    ]  # fmt: skip
    assert deployment.router.url == "http://127.0.0.1:9000"
    assert {member.environment["KVYARD_API_KEY"] for member in (*deployment.engines, deployment.router)} == {"hush"}


def test_each_engine_has_its_step_log_in_the_folder() -> None:
    deployment = deployment_of(
        UpConfiguration(decode=2),
        EngineConfiguration(step_log="/logs"),
        engine_ports=[11, 12, 13],
        secret_file="/s",
        cores=4,
    )
    flags = [argument for member in deployment.engines for argument in member.command if "step-log" in argument]
    assert flags == [f"--step-log=/logs/{name}.steplog" for name in ("prefill-0", "decode-0", "decode-1")]
    assert not any("step-log" in argument for argument in deployment.router.command)


def test_the_folder_of_step_logs_is_made_and_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert folder_of_step_logs("a/b") == f"{tmp_path}/a/b"
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=f"--step-log {tmp_path}/file cannot be a folder .*: File exists"):
        folder_of_step_logs("file")


def test_where_a_listener_is_reached() -> None:
    assert [reachable(host) for host in ("0.0.0.0", "::", "::1", "10.0.0.1")] == [
        "127.0.0.1",
        "[::1]",
        "[::1]",
        "10.0.0.1",
    ]


def test_the_back_off_doubles_to_30_seconds_and_is_forgiven_after_60_of_health() -> None:
    policy = RestartPolicy()
    policy.ready(0.0)
    assert [policy.ended(70, 1.0) for _ in range(8)] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    policy.ready(100.0)
    assert policy.ended(70, 159.9) == 30.0
    policy.ready(200.0)
    assert policy.ended(70, 260.0) == 0.5
    assert policy.ended(70, 400.0) == 1.0  # it was not ready in between, so these 140 s were no health


@pytest.mark.parametrize(("code", "again"), [(1, None), (2, None), (70, 0.5), (-9, 0.5), (0, 0.5)])
def test_only_a_first_start_that_fails_for_a_stated_reason_is_given_up(code: int, again: float | None) -> None:
    assert RestartPolicy().ended(code, 0.0) == again
    well = RestartPolicy()
    well.ready(0.0)
    assert well.ended(code, 1.0) == 0.5


def test_lines_are_prefixed_whole_however_they_come() -> None:
    lines = PrefixedLines("[d] ")
    assert lines.feed(b"one\ntw") == b"[d] one\n"
    assert lines.feed(b"o\n\n") == b"[d] two\n[d] \n"
    assert lines.feed(b"last") == b""
    assert lines.end() == b"[d] last\n"
    assert lines.end() == b""
    long = PrefixedLines("").feed(b"x" * (LONGEST_LINE + 1))
    assert len(long) == LONGEST_LINE + 2  # not kept for ever


async def test_the_relay_ends_with_the_last_writer() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"a\nb")
    os.close(writing)
    written: list[bytes] = []
    await relay(reading, "> ", written.append)
    assert b"".join(written) == b"> a\n> b\n"


def test_free_ports_are_distinct_free_and_out_of_the_way_of_outgoing_connections() -> None:
    ports = free_ports(5, "127.0.0.1", seed=1)
    assert len(set(ports)) == 5
    assert all(10_000 <= port < 32_768 for port in ports)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", ports[0]))
        listener.listen()
        assert ports[0] not in free_ports(5, "127.0.0.1", seed=1)
        with pytest.raises(ConfigurationError, match=f"port {ports[0]} on 127.0.0.1 is in use"):
            check_free("127.0.0.1", ports[0])
