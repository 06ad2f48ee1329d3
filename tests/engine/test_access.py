"""How ranks get at a channel: keys from files, a cache where it pays, a note of what was seen."""

from __future__ import annotations

import json
import os
import pwd
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.engine.fleet import Trainer
from tests.engine.followed import Followed, kind, number
from vllm_delta import Publisher
from vllm_delta.channel import Keys
from vllm_delta.channel.keyfiles import public_path, write_sealing_key, write_signing_key
from vllm_delta.engine.access import Access, check, open_ratchet
from vllm_delta.engine.settings import Settings
from vllm_delta.errors import SettingsError
from vllm_delta.format import Manifest
from vllm_delta.publisher import PublisherSettings

pytestmark = pytest.mark.engine


def test_it_travels_as_plain_values() -> None:
    """Through JSON and back, lists included."""
    access = Access(
        channel="s3://bucket/run",
        trusted_keys=("/a", "/b"),
        sealing_keys=("/c",),
        cache_dir="/cache",
        cache_bytes=7,
    )
    assert Access.from_dict(json.loads(json.dumps(access.to_dict()))) == access


def test_a_remote_channel_has_a_cache_of_the_user_s_own_and_a_directory_none() -> None:
    remote, local = Settings(channel="s3://bucket/run"), Settings(channel="/run")
    folder = Path(tempfile.gettempdir()) / f"vllm-delta-{os.geteuid()}"
    assert Access.of(remote, "").cache_dir == str(folder)
    assert Access.of(remote, "").cache_bytes == 8 << 30
    assert Access.of(local, "").cache() is None
    for channel in ("s3://bucket/run", "/run"):
        off = Settings(channel=channel, cache_dir="/elsewhere", cache_bytes=0)
        assert Access.of(off, "").cache() is None
        named = Settings(channel=channel, cache_dir="/elsewhere")
        assert Access.of(named, "").cache_dir == "/elsewhere"


def test_a_file_s_name_is_told_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A rank may run in another folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    access = Access.of(Settings(trusted_keys=("a.pub", "~/b.pub", "/c.pub")), "")
    assert access.trusted_keys == (str(tmp_path / "a.pub"), "/home/me/b.pub", "/c.pub")


def test_the_note_of_what_was_seen_is_kept_where_it_belongs(tmp_path: Path) -> None:
    """Only with keys; where it is told, else in the user's folder for state."""
    signed = Settings(trusted_keys=("key",))
    assert open_ratchet(Settings(state_dir=str(tmp_path)), "s3://b/r", {}) is None

    def folder(settings: Settings, environment: dict[str, str]) -> Path:
        ratchet = open_ratchet(settings, "s3://b/r", environment)
        assert ratchet is not None
        return ratchet.path.parent

    assert folder(signed, {}) == Path.home() / ".local/state/vllm-delta"
    assert folder(signed, {"XDG_STATE_HOME": "/state"}) == Path("/state/vllm-delta")
    assert folder(signed, {"XDG_STATE_HOME": "state"}) == Path.home() / ".local/state/vllm-delta"
    named = Settings(trusted_keys=("key",), state_dir=str(tmp_path))
    assert folder(named, {"XDG_STATE_HOME": "/state"}) == tmp_path


def test_a_mistake_is_told_at_start_up_by_its_setting(tmp_path: Path) -> None:
    """A key that is not there or is none, and a cache that is somebody else's."""
    (tmp_path / "none").write_text("no key")
    (tmp_path / "file").touch()
    channel = {"channel": str(tmp_path / "channel")}
    bad: list[tuple[str, Any]] = [
        ("trusted_keys", [str(tmp_path / "absent")]),
        ("trusted_keys", [str(tmp_path / "none")]),
        ("sealing_keys", [str(tmp_path / "none")]),
        ("cache_dir", str(tmp_path / "file")),
        ("cache_dir", "~nobody-of-this-name/x"),
        ("cache_dir", "a\0b"),
        ("channel", "ftp://bucket"),
    ]
    assert check(Settings(**channel)) is None
    for field, value in bad:
        with pytest.raises(SettingsError, match=f"field='{field}'"):
            check(Settings(**channel | {field: value}))
    with pytest.raises(SettingsError, match="field='trusted_keys'"):
        check(Settings(trusted_keys=(str(tmp_path / "absent"),)))
    assert check(Settings(channel=str(tmp_path / "no" / "such" / "folder"))) is None


@pytest.mark.parametrize("folder", ["~nobody-of-this-name/x", "a\0b", "\ud800"])
def test_a_folder_for_state_that_cannot_be_is_a_setting(tmp_path: Path, folder: str) -> None:
    write_signing_key(tmp_path / "key")
    signed = Settings(
        channel=str(tmp_path / "channel"),
        trusted_keys=(str(tmp_path / "key.pub"),),
        state_dir=folder,
    )
    with pytest.raises(SettingsError, match="not a folder's name"):
        open_ratchet(signed, "s3://b/r")
    with pytest.raises(SettingsError, match="field='state_dir'"):
        check(signed)


def test_who_has_no_home_names_a_folder_for_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", dict[int, pwd.struct_passwd]().__getitem__)
    with pytest.raises(SettingsError, match="not a folder's name"):
        open_ratchet(Settings(trusted_keys=("key",)), "s3://b/r", {})


class Secured(Followed):
    """Goes on with a trainer that signs and seals, in a channel of its own."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(tmp_path / "plain", monkeypatch)
        self.signing, self.sealing = tmp_path / "signing", tmp_path / "sealing"
        write_signing_key(self.signing)
        write_sealing_key(self.sealing)
        self.settings: dict[str, Any] = {
            "trusted_keys": [str(public_path(self.signing))],
            "sealing_keys": [str(self.sealing)],
            "state_dir": str(tmp_path / "state"),
        }
        self.channel = tmp_path / "secured"
        self.store = type(self.store)(self.channel)
        trainer: Trainer = self.fleet.trainer
        trainer.channel = self.channel
        self.keys = Keys.load(signing=self.signing, sealing=[self.sealing])
        trainer.publisher = Publisher(
            self.channel,
            trainer.weights,
            keys=self.keys,
            settings=PublisherSettings(
                anchor_ratio=1e9, strides=(), n_threads=1, shards=2, blob_bytes=2000
            ),
        )

    def step(self) -> Manifest:
        self.fleet.trainer.newest = lambda: None  # type: ignore[assignment,method-assign]
        return self.fleet.trainer.step()


@pytest.fixture
def secured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Secured:
    return Secured(tmp_path, monkeypatch)


def test_a_signed_and_sealed_channel_is_followed(secured: Secured, tmp_path: Path) -> None:
    """Follower and ranks read the files themselves; what was seen is noted."""
    follower = secured.follow(**secured.settings)
    follower.cycle()
    for reached in (1, 2):
        secured.step()
        follower.cycle()
        assert (number(follower), kind(follower)) == (reached, None)
        assert secured.fleet.holds()
    assert len(list((tmp_path / "state").glob("*.json"))) == 1


def test_who_lacks_a_key_follows_nothing(secured: Secured, tmp_path: Path) -> None:
    """A sealed channel without its key, and one that another trainer signed."""
    secured.step()
    without = secured.follow(**secured.settings | {"sealing_keys": []})
    without.cycle()
    assert (number(without), kind(without), without.ready) == (None, "SettingsError", False)
    write_signing_key(tmp_path / "other")
    trusts_another = {"trusted_keys": [str(public_path(tmp_path / "other"))]}
    other = secured.follow(**secured.settings | trusts_another)
    other.cycle()
    assert (number(other), kind(other), other.ready) == (None, "SignatureError", False)


def test_a_channel_that_was_taken_back_is_refused_by_a_new_engine(
    secured: Secured, tmp_path: Path
) -> None:
    """The note outlives the process; every record is well signed."""
    follower = secured.follow(**secured.settings)
    follower.cycle()
    old = {path: path.read_bytes() for path in secured.channel.rglob("*") if path.is_file()}
    secured.step()
    follower.cycle()
    for path in secured.channel.rglob("*"):
        if path.is_file():
            if path in old:
                path.write_bytes(old[path])
            else:
                path.unlink()
    again = secured.follow(**secured.settings)
    again.cycle()
    assert (kind(again), again.ready) == ("ChainError", False)


def test_a_key_s_file_that_is_missing_is_told_before_anything_is_followed(
    secured: Secured,
) -> None:
    with pytest.raises(SettingsError, match="absent"):
        secured.follow(trusted_keys=["/absent"])


@pytest.fixture
def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Followed:
    return Followed(tmp_path / "channel", monkeypatch)


def test_a_batch_ends_where_memory_does(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions are staged together as far as their bytes fit; each of them fits by itself."""
    follower = followed.follow()
    follower.cycle()
    manifests = [followed.step() for _ in range(4)]
    sizes = [manifest.payload_bytes for manifest in manifests]
    staged: list[list[int]] = []
    driver_stage = type(follower._driver).stage

    def stage(driver: Any, batch: Any) -> None:
        staged.append([manifest.target.number for manifest in batch])
        driver_stage(driver, batch)

    monkeypatch.setattr(type(follower._driver), "stage", stage)
    bounded = followed.follow(memory_bytes=sizes[0] + sizes[1])
    bounded.cycle()
    assert staged[0] == [1, 2]
    while number(bounded) != 4:
        bounded.cycle()
    assert all(sum(sizes[n - 1] for n in batch) <= sizes[0] + sizes[1] for batch in staged)
    assert followed.fleet.holds()


def test_a_version_that_needs_more_memory_is_not_taken_and_named(followed: Followed) -> None:
    manifest = followed.step()
    follower = followed.follow(memory_bytes=manifest.payload_bytes - 1)
    follower.cycle()
    assert (number(follower), kind(follower)) == (0, "SettingsError")
    error = follower.status()["error"]
    assert error["facts"]["needed_bytes"] >= manifest.payload_bytes


def test_ranks_share_what_one_of_them_fetched(followed: Followed, tmp_path: Path) -> None:
    """With a cache, each blob of a version is in its folder after the first of the ranks."""
    manifest = followed.step()
    follower = followed.follow(cache_dir=str(tmp_path / "cache"))
    follower.cycle()
    assert number(follower) == 1
    kept = {path.stem for path in (tmp_path / "cache").glob("*.blob")}
    assert kept == {ref.sha256 for ref in manifest.blobs}
