"""An engine core of its own process with steps in flight, as it is on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.harness import run_module

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_an_engine_with_steps_in_flight(llama: Path, tmp_path: Path) -> None:
    """Requests cross commits, a foreign pause is used and left, a caller that is cancelled
    between pause and resume leaves none and loses no version, and health tells of a fence."""
    said = run_module("tests.engine.async_story", str(llama), str(tmp_path))
    assert "THE END" in said
