"""`kvyard steps --log --request`: requests are found by the X-Request-ID that their client knows, too."""

from __future__ import annotations

from pathlib import Path

from actors.scheduling.recorded import RecordedCore
from actors.scheduling.records import Record, RequestNote
from tests.scheduling.builders import request_of, result_of
from tests.tools.step_table.logs import CONFIG, run, write


def traced(path: Path, **trace_ids: str) -> str:
    """A log of requests that were computed one after the other, each with its X-Request-ID."""
    records: list[Record] = []
    core = RecordedCore(CONFIG, records.append)
    for second, (name, trace_id) in enumerate(trace_ids.items()):
        records.append(RequestNote(name, second, trace_id))
        core.add(request_of(name, 4, max_tokens=1), second)
        core.apply(result_of(core.schedule(second)), second + 0.5)
        core.take_effects()
    return str(write(path, records))


def test_a_request_is_found_by_the_id_that_its_client_knows(tmp_path: Path) -> None:
    """The same X-Request-ID, in the prefill engine's log and in the decode engine's."""
    prefill = traced(tmp_path / "prefill", one="other", two="mine-7", three="")
    decode = traced(tmp_path / "decode", four="mine-7", five="mine-8")
    for log, request_id in ((prefill, "two"), (decode, "four")):
        code, out, error = run("--log", log, "--request", "mine-7")
        assert (code, error) == (0, "")
        assert out.startswith(f"request {request_id} (X-Request-ID mine-7) in both-0 (epoch 1)\n")
    assert run("--log", prefill, "--request", "mine")[1] == run("--log", prefill, "--request", "two")[1]
    assert run("--log", prefill, "--request", "three")[1].startswith("request three in both-0")
    assert run("--log", decode, "--request", "mine") == (
        2,
        "",
        f"kvyard steps: {decode}: 'mine' is the beginning of 2 ids: four (mine-7), five (mine-8)\n",
    )


def test_an_x_request_id_that_several_requests_have_names_them(tmp_path: Path) -> None:
    """A client that sends the same one twice; one that is another's beginning is still its own."""
    log = traced(tmp_path / "log", one="same", two="same", three="same-but-longer", mine="two")
    assert run("--log", log, "--request", "same") == (
        2,
        "",
        f"kvyard steps: {log}: 'same' is the X-Request-ID of 2 requests: one, two\n",
    )
    assert run("--log", log, "--request", "two")[1].startswith("request two (X-Request-ID same)"), "ids go first"
    assert run("--log", log, "--request", "same-")[1].startswith("request three (X-Request-ID same-but-longer)")
