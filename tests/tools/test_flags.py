"""Flags are the configuration Structs: nothing is written twice, so nothing can disagree."""

from __future__ import annotations

import re
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from actors.configuration import EngineConfiguration, RouterConfiguration, UpConfiguration
from tools.flags import arguments_of, configuration_from, flag_of, flags_of, options_of, size_text

STRUCTS = [EngineConfiguration, RouterConfiguration, UpConfiguration]


def run(struct: type[msgspec.Struct], *arguments: str, env: dict[str, str] | None = None) -> tuple[Result, Any]:
    seen: list[msgspec.Struct] = []

    @click.command()
    @options_of(struct)
    def command(**values: Any) -> None:
        seen.append(configuration_from(struct, values))

    result = CliRunner(env={"KVYARD_API_KEY": None} | (env or {})).invoke(command, list(arguments))
    return result, seen[0] if seen else None


@pytest.mark.parametrize("struct", STRUCTS)
def test_help_says_description_unit_and_default_of_every_field(struct: type[msgspec.Struct]) -> None:
    shown = re.sub(r"\s+", " ", run(struct, "--help")[0].output)
    for flag in flags_of(struct):
        if flag.hidden:
            assert flag.flag not in shown
            continue
        assert flag.description, flag.name
        assert flag.flag in shown
        assert flag.help.replace("- ", "-") in shown.replace("- ", "-")
        assert "default:" in flag.help
        if flag.unit:
            assert f"[{flag.unit}" in flag.help


def test_help_of_known_flags_as_a_person_reads_it() -> None:
    shown = re.sub(r"\s+", " ", run(EngineConfiguration, "--help")[0].output)
    assert "--max-body-bytes SIZE largest HTTP body [bytes; default: 8MiB]" in shown
    assert "--kv-memory SIZE size of the KV pool; default: 1GiB, or one full context if that is more [bytes]" in shown
    assert "--lease FLOAT how long a prompt's blocks are kept for a reader [seconds; default: 30.0]" in shown
    assert "--prefix-caching / --no-prefix-caching" in shown
    assert "[bfloat16|float32]" in shown
    assert "--fault" not in shown


@pytest.mark.parametrize("struct", STRUCTS)
def test_no_flag_means_the_struct_s_own_defaults(struct: type[msgspec.Struct]) -> None:
    assert run(struct)[1] == struct()


def test_every_kind_of_flag() -> None:
    _, engine = run(
        EngineConfiguration, "--kv-memory", "512MiB", "--no-prefix-caching", "--lease", "7.5", "--role=decode"
    )
    assert (engine.kv_memory, engine.prefix_caching, engine.lease, engine.role) == (512 << 20, False, 7.5, "decode")
    _, router = run(RouterConfiguration, "--prefill", "http://a", "--prefill", "http://b")
    assert router.prefill == ("http://a", "http://b")


def test_the_key_comes_from_the_environment_and_a_flag_wins() -> None:
    env = {"KVYARD_API_KEY": "from-env"}
    assert run(RouterConfiguration, env=env)[1].api_key == "from-env"
    assert run(RouterConfiguration, "--api-key", "flag", env=env)[1].api_key == "flag"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--block-size", "0"], "Error: --block-size: expected `int` >= 1\n"),
        (["--port", "70000"], "Error: --port: expected `int` <= 65535\n"),
        # An unset variable of a shell must not open everything.
        (["--api-key", ""], "Error: --api-key: expected `str` of length >= 1\n"),
        (["--served-model-name="], "Error: --served-model-name: expected `str` of length >= 1\n"),
        (["--watermark", "1"], "Error: --watermark: expected `float` < 1.0\n"),
    ],
)
def test_a_value_out_of_bounds_is_one_line_with_the_flag_and_exit_code_2(arguments: list[str], message: str) -> None:
    result, _ = run(EngineConfiguration, *arguments)
    assert (result.exit_code, result.output) == (2, message)


@pytest.mark.parametrize("arguments", [["--kv-memory", "lots"], ["--role", "chef"], ["--threads", "x"], ["--nonsense"]])
def test_a_value_that_cannot_be_read_names_the_flag_with_exit_code_2(arguments: list[str]) -> None:
    result, _ = run(EngineConfiguration, *arguments)
    assert result.exit_code == 2
    assert arguments[0] in result.output


@given(size=st.integers(1, 1 << 40))
def test_a_size_reads_back_exactly(size: int) -> None:
    from actors.configuration import parse_size

    assert parse_size(size_text(size)) == size


@given(
    st.builds(
        EngineConfiguration,
        model=st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1),
        kv_memory=st.integers(1, 1 << 40),
        prefix_caching=st.booleans(),
        lease=st.floats(0.001, 1e6),
        role=st.sampled_from(["both", "prefill", "decode"]),
        engine_id=st.none() | st.just("-odd=name"),
    )
)
def test_a_configuration_survives_the_way_through_a_command_line(engine: EngineConfiguration) -> None:
    assert run(EngineConfiguration, *arguments_of(engine))[1] == engine


def test_a_repeated_flag_survives_too_and_a_skipped_one_is_left_out() -> None:
    router = RouterConfiguration(prefill=("http://a", "http://b"), port=9, api_key="secret")
    assert arguments_of(router, skip={"api_key"}) == ["--prefill=http://a", "--prefill=http://b", "--port=9"]
    assert flag_of("kv_memory") == "--kv-memory"
