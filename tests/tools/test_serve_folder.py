"""`kvyard serve` with a Hugging Face folder: a tiny Qwen3 over HTTP says what transformers says, in float32."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.kernel.process import PARENT_PID
from runner.store.cache import default_cache
from tests.deployment.harness import ROOT, free_port, get_json, wait_for

# The characters from "!" to "~", and the space as byte-level vocabularies write it.
TOKENS = [*map(chr, range(33, 127)), "Ġ"]
PROMPT = "Keys and values lie in blocks of sixteen tokens; this prompt has some more than five of them."
TEMPLATE = "{% for message in messages %}<{{ message.role }}> {{ message.content }} {% endfor %}"


@pytest.fixture(scope="module")
def model_and_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(5)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            vocab_size=len(TOKENS),
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=256,
            initializer_range=0.2,
        )
    ).eval()
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen3"
    model.save_pretrained(folder, max_shard_size="50KB")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocabulary = {token: index for index, token in enumerate(TOKENS)}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": byte_level, "decoder": byte_level}
    tokenizer["model"] = {"type": "BPE", "vocab": vocabulary, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return model, folder


@pytest.fixture(scope="module")
def url(model_and_folder: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port, cache = free_port(), tmp_path_factory.mktemp("cache")
    # No model of before, but the kernels that everybody has built.
    built = default_cache() / "kernels"
    built.mkdir(parents=True, exist_ok=True)
    (cache / "kernels").symlink_to(built)
    flags = ["--role", "both", "--port", str(port), "--dtype", "float32", "--kv-memory", "4MiB", "--threads", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.cli", "serve", "--model", str(model_and_folder[1]), *flags],
        cwd=ROOT,
        env={**os.environ, "KVYARD_CACHE": str(cache), PARENT_PID: str(os.getpid())},
        start_new_session=True,
    )
    try:

        def ready() -> bool:
            assert process.poll() is None, "kvyard serve ended"
            return bool(get_json(f"http://127.0.0.1:{port}/v1/models")["data"]) and answers(port, "/ready")

        wait_for("the engine is ready", ready, 120.0)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def answers(port: int, path: str) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return bool(answer.status == 200)


def post(url: str, path: str, **body: Any) -> Any:
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def said_by_transformers(model: Any, text: str, num_tokens: int) -> str:
    """Greedy. Every token is one character, so ids and text are turned into each other by hand."""
    prompt = torch.tensor([[TOKENS.index("Ġ" if character == " " else character) for character in text]])
    model.generation_config.eos_token_id = None
    output = model.generate(prompt, do_sample=False, max_new_tokens=num_tokens, pad_token_id=0)
    return "".join(TOKENS[token] for token in output[0, prompt.shape[1] :]).replace("Ġ", " ")


def test_a_completion(url: str, model_and_folder: tuple[Any, Path]) -> None:
    assert get_json(f"{url}/v1/models")["data"][0]["id"] == "tiny-qwen3"
    answer = post(url, "/v1/completions", model="tiny-qwen3", prompt=PROMPT, max_tokens=60, temperature=0)
    text = answer["choices"][0]["text"]
    assert text == said_by_transformers(model_and_folder[0], PROMPT, 60)
    assert len(set(text)) > 10
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)


def test_a_conversation(url: str, model_and_folder: tuple[Any, Path]) -> None:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why?"}]
    answer = post(
        url, "/v1/chat/completions", model="tiny-qwen3", messages=messages, max_completion_tokens=20, temperature=0
    )
    rendered = "<system> Be short. <user> Why? "
    assert answer["choices"][0]["message"]["content"] == said_by_transformers(model_and_folder[0], rendered, 20)
