"""Why a backend cannot be had."""

from __future__ import annotations


class BackendUnavailable(Exception):
    """The text says what is missing and what to do about it."""
