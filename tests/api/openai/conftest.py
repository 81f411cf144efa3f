"""The real model's tokenizer and template; uvloop, as in production."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import tokenizers
import uvloop

from actors.messages.model import ModelDescription
from runner.store.store import resolve
from tests.api.openai.scripted import MODEL


@pytest.fixture(scope="session")
def description() -> ModelDescription:
    return resolve(MODEL)


@pytest.fixture(scope="session")
def tokenizer(description: ModelDescription) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(Path(description.folder) / "tokenizer.json"))


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}
