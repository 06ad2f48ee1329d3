"""Settings that make no sense are refused by name; what is set comes from where it should."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_delta.engine.settings import Settings, read_settings
from vllm_delta.errors import SettingsError

BAD: dict[str, Any] = {
    "channel": "",
    "kv_policy": "sometimes",
    "min_interval_s": -1,
    "max_recompute_share": 0,
    "poll_interval_s": 0,
    "stage_ahead": 0,
    "rollback_bytes": -1,
    "scan_interval_s": -0.5,
    "memory_bytes": 0,
    "trusted_keys": "/a.pub",
    "sealing_keys": [""],
    "cache_dir": "",
    "cache_bytes": -1,
    "state_dir": "",
}


@pytest.mark.parametrize("field", BAD)
def test_a_value_that_makes_no_sense_names_its_field(field: str) -> None:
    """Every field has a value that is refused with the field's name."""
    with pytest.raises(SettingsError, match=field) as caught:
        read_settings({"vllm_delta": {field: BAD[field]}}, {})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("channel", 7),
        ("min_interval_s", "5"),
        ("min_interval_s", True),
        ("poll_interval_s", float("nan")),
        ("max_recompute_share", 1.5),
        ("scan_interval_s", float("inf")),
        pytest.param("scan_interval_s", 10**5000, id="huge"),
        ("poll_interval_s", 1e10),
        ("stage_ahead", 2.0),
        ("stage_ahead", True),
        ("stage_ahead", None),
        ("poll_interval_s", "1"),
        ("trusted_keys", ("/a", 7)),
        ("trusted_keys", None),
        ("sealing_keys", {"/a": 1}),
        ("cache_bytes", 1.5),
        ("cache_dir", 7),
        ("kv_policy", None),
    ],
)
def test_a_value_of_the_wrong_type_names_its_field(field: str, value: Any) -> None:
    """Types are not converted silently, and numbers are finite."""
    with pytest.raises(SettingsError, match=field):
        Settings(**{field: value})


def test_an_unknown_name_is_an_error() -> None:
    """A typing mistake in either source is told, not ignored."""
    with pytest.raises(SettingsError, match="chanel"):
        read_settings({"vllm_delta": {"chanel": "/c"}}, {})
    with pytest.raises(SettingsError, match="VLLM_DELTA_CHANEL"):
        read_settings(None, {"VLLM_DELTA_CHANEL": "/c"})
    with pytest.raises(SettingsError, match="not an object"):
        read_settings({"vllm_delta": "/c"}, {})


def test_the_configuration_wins_over_the_environment() -> None:
    """Other variables and other people's configuration are left alone."""
    environment = {
        "VLLM_DELTA_CHANNEL": "/environment",
        "VLLM_DELTA_STAGE_AHEAD": "3",
        "VLLM_DELTA_MIN_INTERVAL_S": "1.5",
        "VLLM_PORT": "1",
    }
    found = read_settings({"vllm_delta": {"channel": "/config"}, "others": 1}, environment)
    assert found == Settings(channel="/config", stage_ahead=3, min_interval_s=1.5)
    assert read_settings(None, {}) == Settings()


def test_a_variable_that_is_no_number_names_itself() -> None:
    """Text where a number belongs."""
    with pytest.raises(SettingsError, match="VLLM_DELTA_STAGE_AHEAD"):
        read_settings(None, {"VLLM_DELTA_STAGE_AHEAD": "many"})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ()),
        ("/a", ("/a",)),
        ("/a.pub, /b.pub,", ("/a.pub", "/b.pub")),
        ('["/a,b.pub"]', ("/a,b.pub",)),
        (" []", ()),
    ],
)
def test_a_list_in_a_variable_is_json_or_has_commas(text: str, found: tuple[str, ...]) -> None:
    """In the configuration it is a list, and either is the same to a component."""
    assert read_settings(None, {"VLLM_DELTA_TRUSTED_KEYS": text}).trusted_keys == found
    assert read_settings({"vllm_delta": {"trusted_keys": list(found)}}, {}).trusted_keys == found


@pytest.mark.parametrize("text", ["[", '["/a", 7]', "[[]]", "[" * 100_000])
def test_a_variable_that_is_no_list_names_itself(text: str) -> None:
    """Broken JSON, and JSON of other things than names."""
    with pytest.raises(SettingsError, match=r"(?i)sealing_keys"):
        read_settings(None, {"VLLM_DELTA_SEALING_KEYS": text})


@pytest.mark.parametrize(
    ("channel", "poll_s", "is_remote"),
    [
        (None, 0.5, False),
        ("/run", 0.5, False),
        ("file:///run", 0.5, False),
        ("run:1", 0.5, False),
        ("s3://bucket/run", 5.0, True),
        ("hf://buckets/me/run", 5.0, True),
    ],
)
def test_a_remote_store_is_asked_less_often(
    channel: str | None, poll_s: float, is_remote: bool
) -> None:
    """It counts requests. What is set counts more."""
    settings = Settings(channel=channel)
    assert (settings.poll_s, settings.is_remote) == (poll_s, is_remote)
    assert Settings(channel=channel, poll_interval_s=0.1).poll_s == 0.1
    found = read_settings(None, {"VLLM_DELTA_POLL_INTERVAL_S": "2"})
    assert found.poll_s == 2.0
