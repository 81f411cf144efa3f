"""Shared by all tests: the real default model, from the model store."""

from __future__ import annotations

import pytest

from actors.messages.model import ModelDescription
from runner.store.store import resolve


@pytest.fixture(scope="session")
def default_model() -> ModelDescription:
    return resolve("smollm2-135m-instruct")
