"""Manifests through the Hub's S3 gateway, which writes only where nothing is when asked to.

It is used for nothing but `put_new` of manifests: all else, reads included, goes the Hub's own way.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from vllm_delta.channel.hub_client import checked_endpoint, require
from vllm_delta.errors import AuthError, SettingsError

if TYPE_CHECKING:
    from obstore.store import S3Credential

    from vllm_delta.channel.object import ObjectStore

ENDPOINT = "https://s3.hf.co"
REGION = "us-east-1"
"""What the gateway wants requests to be signed for, wherever the bucket is."""

_ENDPOINT, _KEY, _SECRET = "HF_S3_ENDPOINT", "HF_S3_ACCESS_KEY_ID", "HF_S3_SECRET_ACCESS_KEY"


class Gateway:
    """Writes manifests of a channel in a bucket. Safe from any thread.

    The keys of `HF_S3_ACCESS_KEY_ID` and `HF_S3_SECRET_ACCESS_KEY` are looked up at the first
    write, so readers need none. `HF_S3_ENDPOINT` is another gateway, without the namespace.
    """

    def __init__(self, bucket: str, prefix: str) -> None:
        self._bucket, self._prefix = bucket, prefix
        self._lock = threading.Lock()
        self._opened: ObjectStore | None = None

    def put_new(self, key: str, data: bytes) -> bool:
        """Write a manifest unless one is there, in one step; see `ObjectStore.put_new`.

        The first call probes the gateway: three more requests.

        Raises:
            AuthError: there are no keys, or they are not let in.
            SettingsError: the gateway ignores conditions, or obstore is missing.
        """
        return self._store().put_new(key, data)

    def _store(self) -> ObjectStore:
        with self._lock:
            if self._opened is None:
                self._opened = self._open()
            return self._opened

    def _open(self) -> ObjectStore:
        require("obstore", "0.12")
        from obstore.exceptions import BaseError
        from obstore.store import S3Store

        from vllm_delta import __version__
        from vllm_delta.channel.object import ObjectStore
        from vllm_delta.channel.object_clients import Address

        namespace, name = self._bucket.split("/")
        endpoint = checked_endpoint(_ENDPOINT, (os.environ.get(_ENDPOINT) or ENDPOINT).rstrip("/"))
        key, secret = os.environ.get(_KEY), os.environ.get(_SECRET)
        if not key or not secret:
            raise AuthError(
                "manifests by the S3 gateway need keys, made from a token in the Hub's settings",
                bucket=self._bucket,
                missing=_SECRET if key else _KEY,
            )
        try:
            client = S3Store(
                name,
                prefix=self._prefix or None,
                endpoint=f"{endpoint}/{namespace}",
                region=REGION,
                # Given this way, so that nothing of AWS's in the environment is sent along.
                credential_provider=lambda: _credentials(key, secret),
                virtual_hosted_style_request=False,
                skip_signature=False,
                client_options={
                    "connect_timeout": "10s",
                    "timeout": "30s",
                    "allow_http": endpoint.startswith("http://"),
                    "user_agent": f"vllm-delta/{__version__}",
                },
                retry_config={"max_retries": 0},
            )
        except (BaseError, ValueError) as error:
            cause = str(error).partition("\n")[0]
            raise SettingsError(
                "the S3 gateway's settings", endpoint=endpoint, cause=cause
            ) from error
        return ObjectStore(Address("s3", name, self._prefix), client=client)


def _credentials(key: str, secret: str) -> S3Credential:
    return {
        "access_key_id": key, "secret_access_key": secret, "token": None, "expires_at": None,
    }  # fmt: skip
