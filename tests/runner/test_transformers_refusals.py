"""What is not served through transformers: each refusal names the field, when the model is resolved."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from actors.messages.errors import ConfigurationError
from runner.model_runner import ModelRunner
from runner.store import through_transformers
from runner.store.store import resolve
from runner.transformers_model.examine import examine
from tests.runner.conftest import TINY, write_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

TinyFolder = Callable[..., tuple[Any, Path]]
ROOT = Path(__file__).parents[2]

LONGROPE = {"rope_type": "longrope", "long_factor": [2.0] * 8, "short_factor": [1.0] * 8}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "encoder and decoder": ("T5", {"d_model": 64, "d_kv": 16, "d_ff": 96}, "is_encoder_decoder true"),
    "cross-attention": ("GPT2", {"add_cross_attention": True}, "add_cross_attention true"),
    "a state space": ("Mamba", {"state_size": 4}, "state_size 4: a state space keeps state"),
    "attention beside a state space": (
        "FalconH1",
        {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
        "mamba_d_state 256",
    ),
    "linear attention": ("Qwen3Next", {}, "layer_types linear_attention"),
    "convolutions": ("Lfm2", {"full_attn_idxs": [1]}, "layer_types conv"),
    "ALiBi": ("Bloom", {"n_layer": 2, "n_head": 4}, "model_type bloom: its forward takes no position_ids"),
    "bidirectional": ("Bert", {"is_decoder": False}, "is_causal false: its layers look"),
    "an attention of its own": (
        "GPTNeo",
        {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
        "model_type gpt_neo",
    ),
    "dynamic positions": ("Llama", {"rope_parameters": DYNAMIC}, "rope_type dynamic: its angles change"),
    "positions by length": (
        "Phi3",
        {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 64}, "max_position_embeddings": 256},
        "rope_type longrope: its angles change",
    ),
    "attention sinks": ("GptOss", {"num_local_experts": 4, "head_dim": 16}, "s_aux: its layers hand this"),
    "more than text": ("Gemma3", {}, "text_config: it is a model of more than text"),
    "chunks": ("Llama4Text", {"attention_chunk_size": 32, "head_dim": 16}, "attention_chunk_size"),
    "latent attention": (
        "DeepseekV2",
        {
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "first_k_dense_replace": 2,
        },
        "head sizes 24 of keys and 16 of values",
    ),
}


def folder_of(name: str, settings: dict[str, Any], path: Path) -> Path:
    """Only what comes before the weights is looked at: they are one small tensor."""
    import transformers

    sizes = {key: value for key, value in TINY.items() if key != "initializer_range"}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if name == "Gemma3":
        configuration = transformers.Gemma3Config()
    elif name in ("T5", "Mamba", "Bloom", "GPTNeo"):
        configuration = getattr(transformers, f"{name}Config")(hidden_size=64, vocab_size=320, **settings)
    else:
        configuration = getattr(transformers, f"{name}Config")(**(sizes | tokens | settings))
    configuration.save_pretrained(path)
    save_file({"weight": torch.zeros(2)}, path / "model.safetensors")
    write_tokenizer(path, 320)
    return path


@pytest.mark.parametrize(("name", "settings", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_a_refusal_names_the_field(
    name: str, settings: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(through_transformers, "ask_transformers", lambda folder: examine(str(folder)))
    folder = folder_of(name, settings, tmp_path / "model")
    with pytest.raises(ConfigurationError) as refusal:
        resolve(str(folder), tmp_path / "cache")
    text = str(refusal.value)
    assert text.startswith(f"{folder}/config.json has ")
    assert ", which kvyard does not run natively, and not through transformers either: " in text
    assert said in text
    assert "\n" not in text


def test_the_examiner_is_a_process_of_its_own(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """Resolving imports neither torch nor transformers; the second time nobody is asked."""
    from transformers import Olmo2Config

    _, folder = tiny_folder(Olmo2Config(**TINY))
    code = (
        "import sys; from pathlib import Path; from runner.store import store, through_transformers\n"
        "first = store.resolve(sys.argv[1], Path(sys.argv[2]))\n"
        "through_transformers.ask_transformers = None\n"
        "assert store.resolve(sys.argv[1], Path(sys.argv[2])) == first\n"
        "print(first.architecture, first.num_kv_heads, first.head_size, first.modelling)\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(folder), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.stdout.splitlines() == ["olmo2 2 16 transformers", "[]"], result.stderr


def test_without_transformers_it_says_what_to_install(
    tiny_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Olmo2Config

    _, folder = tiny_folder(Olmo2Config(**TINY))
    monkeypatch.setattr(through_transformers, "ask_transformers", lambda path: examine(str(path)))
    known = resolve(str(folder), tmp_path / "known")  # before it was taken away
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigurationError, match=r"model_type 'olmo2', which .* pip install -e '\.\[hf\]'"):
        resolve(str(folder), tmp_path / "new")
    with pytest.raises(ConfigurationError, match=r"needs transformers, .* pip install -e '\.\[hf\]'"):
        ModelRunner(known, device="cpu", dtype="float32", num_blocks=4, block_size=16, threads=1)


def test_an_examiner_that_dies_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of("Olmo2", {}, tmp_path / "model")
    monkeypatch.setattr(through_transformers, "_EXAMINER", "runner.no_such_module")
    with pytest.raises(ConfigurationError, match=r"transformers could not be asked: .*No module named runner\.no_such"):
        resolve(str(folder), tmp_path / "cache")


def test_weights_that_do_not_fit(tiny_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Olmo2Config

    monkeypatch.setattr(through_transformers, "ask_transformers", lambda path: examine(str(path)))
    _, folder = tiny_folder(Olmo2Config(**TINY))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 3, "layer_types": None}))
    with pytest.raises(ConfigurationError, match=r"lack \d+ tensors, such as model\.layers\.2\."):
        ModelRunner(
            resolve(str(folder), tmp_path), device="cpu", dtype="float32", num_blocks=4, block_size=16, threads=1
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_that_meet_outside_the_attention(
    dtype: str, tiny_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that adds each token's neighbour, as RWKV's token shift does, is right for one text and wrong for two in
    one step. No field tells: the proof at the start finds it, and says nothing of the same model without the shift."""
    from transformers import Olmo2Config
    from transformers.models.olmo2.modeling_olmo2 import Olmo2MLP

    monkeypatch.setattr(through_transformers, "ask_transformers", lambda path: examine(str(path)))
    description = resolve(str(tiny_folder(Olmo2Config(**TINY))[1]), tmp_path)

    def start() -> None:
        ModelRunner(description, device="cpu", dtype=dtype, num_blocks=4, block_size=16, threads=1)

    start()
    honest = Olmo2MLP.forward

    def shifted(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return honest(self, hidden + torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1])

    monkeypatch.setattr(Olmo2MLP, "forward", shifted)
    with pytest.raises(ConfigurationError, match="model_type olmo2: requests computed together differ from each alone"):
        start()
