"""The unmodified clients of the loopback Hub, as the tests use them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import hf_xet
import httpx
import huggingface_hub
import obstore
import pytest
from huggingface_hub.utils import disable_progress_bars
from obstore.store import S3Store

from vllm_delta.testing.hub import LoopbackHub

BUCKET = "me/channel"


def use_clients(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Let huggingface_hub on the network, with its caches in `home` and no progress bars."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_XET_CACHE", str(home))
    disable_progress_bars()


def noise(n_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(n_bytes)


def hf(hub: LoopbackHub, token: str | None = None) -> huggingface_hub.HfApi:
    return huggingface_hub.HfApi(endpoint=hub.endpoint, token=token or hub.token)


def upload(hub: LoopbackHub, files: dict[str, bytes]) -> None:
    hf(hub).batch_bucket_files(BUCKET, add=[(data, path) for path, data in files.items()])


def download(hub: LoopbackHub, paths: list[str], folder: Path) -> dict[str, bytes]:
    wanted = [(path, str(folder / path)) for path in paths]
    hf(hub).download_bucket_files(BUCKET, wanted, raise_on_missing_files=True)
    return {path: (folder / path).read_bytes() for path in paths}


def http(hub: LoopbackHub, token: str | None = None, **settings: Any) -> httpx.Client:
    headers = {"Authorization": f"Bearer {token or hub.token}"}
    return httpx.Client(base_url=hub.endpoint, headers=headers, trust_env=False, **settings)


def resolve_url(path: str) -> str:
    return f"/buckets/{BUCKET}/resolve/{path}"


def resolve(hub: LoopbackHub, path: str, **headers: str) -> httpx.Response:
    with http(hub) as client:
        return client.get(resolve_url(path), headers=headers)


def xet_token(hub: LoopbackHub, role: str = "read") -> dict[str, Any]:
    with http(hub) as client:
        facts: dict[str, Any] = client.get(f"/api/buckets/{BUCKET}/xet-{role}-token").json()
    return facts


def xet_group(hub: LoopbackHub, **tokens: Any) -> hf_xet.XetDownloadStreamGroup:
    """A group of downloads that tries twice and not for long, with a token of its own."""
    patience = {"client.retry_max_attempts": 2, "client.retry_base_delay": "100ms"}
    session = hf_xet.XetSession(hf_xet.XetConfig().with_config(patience))
    if not tokens:
        facts = xet_token(hub)
        tokens = {"token": facts["accessToken"], "token_expiry_unix_secs": facts["exp"]}
        tokens["endpoint"] = facts["casUrl"]
    return session.new_download_stream_group(**tokens)


def xet_read(
    hub: LoopbackHub, path: str, start: int | None = None, end: int | None = None
) -> bytes:
    return b"".join(xet_group(hub).download_stream(xet_info(hub, path), start, end))


def xet_info(hub: LoopbackHub, path: str) -> hf_xet.XetFileInfo:
    (there,) = hf(hub).get_bucket_paths_info(BUCKET, [path])
    return hf_xet.XetFileInfo(there.xet_hash, there.size)


def xet_tries(group: hf_xet.XetDownloadStreamGroup, info: hf_xet.XetFileInfo) -> bytes | None:
    """What a stream of a file gives; None when it fails or ends early.

    By a race within hf_xet 1.8 a stream that fails ends now and then as if all were well.
    """
    try:
        found = b"".join(group.download_stream(info))
    except (OSError, RuntimeError):
        return None
    return found if len(found) == info.file_size else None


def s3(hub: LoopbackHub, *, bucket: str = BUCKET, **settings: Any) -> S3Store:
    namespace, name = bucket.split("/")
    return S3Store(
        name,
        endpoint=f"{hub.endpoint}/s3/{namespace}",
        region="us-east-1",
        access_key_id="HFAK0",
        secret_access_key="secret",
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
        **settings,
    )


def s3_read(hub: LoopbackHub, path: str) -> bytes:
    return bytes(obstore.get(s3(hub), path).bytes())
