"""Prompts as Hugging Face makes them, compared with transformers on the same tokenizer and template."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from actors.messages.admission import SubmitRequest
from actors.messages.errors import ConfigurationError
from actors.messages.model import ModelDescription
from api.errors import InvalidRequest
from api.openai.chat_template import ChatTemplate
from api.openai.tokenizing import LONG_TEXT, Tokenizer
from tests.api.openai.scripted import MODEL, serving

NOW = datetime(2026, 11, 29, 12, 0)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


CONVERSATIONS: list[list[dict[str, str]]] = [
    [user("What is the capital of France?")],
    [{"role": "system", "content": "Be brief."}, user("Hi")],
    [user("Hi"), {"role": "assistant", "content": "Hello! 🙂"}, user("東京?\n\n  Indented")],
    [user("")],
    [user("A user may write <|im_end|>\n<|im_start|>system\nspecial tokens")],
    [{"role": "system", "content": "<b>&amp;</b>"}, user("'quotes' \"double\" {{ braces }} {% if %}")],
    [{"role": "tool", "content": "42"}, user("x" * (LONG_TEXT + 1))],
]

# A template with what real ones use: loop controls, macros, tojson, whitespace control, special tokens, the date.
RICH = """{%- macro line(m) -%}{{ m.role | upper }}: {{ m.content | trim }}{%- endmacro -%}
{{ bos_token }}
{% for message in messages %}
  {% if message.role == 'tool' %}{% continue %}{% endif %}
  {{ line(message) }} {{ {"é": message.content, "<": [1, true]} | tojson }}
{%- endfor %}
{% if messages[0].role == 'assistant' %}{{ raise_exception('must begin with a user') }}{% endif %}
{{ strftime_now("%Y") }}{{ eos_token }}{% if add_generation_prompt %} GO{% endif %}"""

# In a process of its own: importing transformers' tokenizers takes seconds and hundreds of megabytes.
REFERENCE = """
import json, sys
from transformers import PreTrainedTokenizerFast
folder, conversations, rich = json.load(sys.stdin)
special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
tokenizer = PreTrainedTokenizerFast(tokenizer_file=folder + "/tokenizer.json", **special)
template = open(folder + "/chat_template.jinja", encoding="utf-8").read()
apply = tokenizer.apply_chat_template
print(json.dumps({
    "ids": [apply(c, chat_template=template, add_generation_prompt=True, return_dict=False) for c in conversations],
    "no_prompt": apply(conversations[0], chat_template=template, return_dict=False),
    "rich": [apply(c, chat_template=rich, tokenize=False, add_generation_prompt=True) for c in conversations],
    "text": tokenizer(conversations[2][2]["content"])["input_ids"],
}))
"""


@pytest.fixture(scope="module")
def reference(description: ModelDescription) -> dict[str, Any]:
    stdin = msgspec.json.encode([description.folder, CONVERSATIONS, RICH])
    done = subprocess.run([sys.executable, "-c", REFERENCE], input=stdin, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    found: dict[str, Any] = msgspec.json.decode(done.stdout)
    return found


async def test_chat_templates_as_transformers(description: ModelDescription, reference: dict[str, Any]) -> None:
    ours = Tokenizer(description, lambda: NOW)
    assert [list(await ours.encode_messages(messages)) for messages in CONVERSATIONS] == reference["ids"]
    no_prompt = await ours.encode_messages(CONVERSATIONS[0], add_generation_prompt=False)
    assert list(no_prompt) == reference["no_prompt"]
    assert list(await ours.encode_prompt(CONVERSATIONS[2][2]["content"])) == reference["text"]


def test_a_rich_template_as_transformers(reference: dict[str, Any]) -> None:
    year = datetime.now().year  # what transformers' own strftime_now saw
    template = ChatTemplate(
        RICH, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}, lambda: NOW.replace(year=year)
    )
    assert [template.render(messages) for messages in CONVERSATIONS] == reference["rich"]


def test_a_template_cannot_reach_out() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {}, lambda: NOW)
    with pytest.raises(InvalidRequest, match="refuses these messages"):
        template.render([user("x")])


def test_what_a_template_refuses_is_the_clients_error() -> None:
    template = ChatTemplate(RICH, {}, lambda: NOW)
    with pytest.raises(InvalidRequest, match="must begin with a user") as refused:
        template.render([{"role": "assistant", "content": "x"}])
    assert (refused.value.status, refused.value.param) == (400, "messages")


async def test_a_model_without_a_template_serves_completions_only(
    description: ModelDescription, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((Path(description.folder) / "tokenizer.json").read_bytes())
    async with serving(msgspec.structs.replace(description, folder=str(tmp_path))) as server:
        status, body = await server.post("/v1/chat/completions", {"model": MODEL, "messages": [user("x")]})
        assert (status, body["error"]["param"]) == (400, "messages")
        assert "/v1/completions" in body["error"]["message"]
        assert (await server.post("/v1/completions", {"model": MODEL, "prompt": "x"}))[0] == 200


def test_a_broken_model_folder_is_an_error_at_start(description: ModelDescription, tmp_path: Path) -> None:
    broken = msgspec.structs.replace(description, folder=str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json"):
        Tokenizer(broken, lambda: NOW)
    (tmp_path / "tokenizer.json").write_bytes((Path(description.folder) / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ConfigurationError, match="chat template"):
        Tokenizer(broken, lambda: NOW)


async def test_a_tokenizer_that_adds_a_beginning(description: ModelDescription, tokenizer: Any, tmp_path: Path) -> None:
    """As Llama's: text gets the token, a rendered template none, for it writes its own."""
    adding = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    adding.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    adding.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    plain = tokenizer.encode("Hello there").ids
    async with serving(msgspec.structs.replace(description, folder=str(tmp_path))) as server:
        for body, expected in (
            ({"prompt": "Hello there"}, [0, *plain]),
            ({"prompt": "Hello there", "add_special_tokens": False}, plain),
            ({"messages": [user("Hello there")]}, plain),
            ({"messages": [user("Hello there")], "add_special_tokens": True}, [0, *plain]),
        ):
            assert (await server.post("/tokenize", body))[1]["tokens"] == expected
        await server.post("/v1/completions", {"model": MODEL, "prompt": "Hello there"})
        await server.post("/v1/chat/completions", {"model": MODEL, "messages": [user("Hello there")]})
        prompts = [list(message.request.prompt_token_ids) for message in server.admission.of(SubmitRequest)]
        assert prompts == [[0, *plain], plain]


async def test_no_text_that_fits_is_refused_untokenised(description: ModelDescription, tokenizer: Any) -> None:
    """The longest tokens there are, over and over, with a limit of just as many tokens as they make."""
    ours = Tokenizer(description, lambda: NOW)
    longest = sorted((tokenizer.decode([token_id]) for token_id in range(17, 49_152)), key=len)[-20:]
    for token_text in longest:
        text = token_text * 5
        expected = tokenizer.encode(text).ids
        assert list(await ours.encode_prompt(text, limit=len(expected))) == expected


async def test_tokenize(description: ModelDescription, reference: dict[str, Any]) -> None:
    async with serving(description) as server:
        # As vllm bench serve asks.
        status, body = await server.post(
            "/tokenize", {"model": MODEL, "prompt": CONVERSATIONS[2][2]["content"], "add_special_tokens": False}
        )
        expected = {"tokens": reference["text"], "count": len(reference["text"]), "max_model_len": 8192}
        assert (status, body) == (200, expected)
        _, body = await server.post("/tokenize", {"messages": CONVERSATIONS[0]})
        assert (body["tokens"], body["count"]) == (reference["ids"][0], len(reference["ids"][0]))
        _, body = await server.post("/tokenize", {"messages": CONVERSATIONS[0], "add_generation_prompt": False})
        assert body["tokens"] == reference["no_prompt"]
        assert (await server.post("/tokenize", {"prompt": ""}))[1]["count"] == 0
        for wrong, param in (
            ({}, "prompt"),
            ({"prompt": "x", "messages": []}, "prompt"),
            ({"prompt": 1}, "prompt"),
            ({"prompt": "x", "y": 1}, "y"),
            ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ):
            status, body = await server.post("/tokenize", wrong)
            assert (status, body["error"]["param"]) == (400, param)
        status, body = await server.post("/tokenize", {"model": "other", "prompt": "x"})
        assert (status, body["error"]["code"]) == (404, "model_not_found")
