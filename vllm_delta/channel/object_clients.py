"""Addresses of object stores, and clients for them with each cloud's usual credentials."""

from __future__ import annotations

import http.client
import importlib.util
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from vllm_delta.channel.object_errors import is_panic, panicked
from vllm_delta.errors import SettingsError

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, S3Store

    Client = S3Store | GCSStore | AzureStore

SUPPORTED = "s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"

_ADDRESS = re.compile(r"(s3|gs|az)://([^/]*)(?:/(.*))?", re.IGNORECASE | re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}|\$root|\$web")
# What needs no escape anywhere, so that one address names one place and is shown as it was given.
_SEGMENT = re.compile(r"[A-Za-z0-9!$&'()+,.:;=@_-]+")
_MAX_PREFIX_BYTES = 512

_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_NOT_BY_PROFILE = ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE")
_BY_PLATFORM = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_HTTP = re.compile(r"https?://")
_REGION_S = 5.0

# From the start of a request to its answer's head, and between two pieces of its body. It has to
# hold a whole upload of a part; how long a whole object takes is not bounded.
_TIMEOUTS = {"connect_timeout": "5s", "read_timeout": "60s", "timeout": "24h"}


@dataclass(frozen=True)
class Address:
    """A place in an object store: `scheme://bucket/prefix`; the prefix may be empty."""

    scheme: str
    bucket: str
    prefix: str

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")


def parse_address(url: str) -> Address:
    """The place that a URL names.

    Raises:
        SettingsError: it names none. What may be a secret in it is not repeated.
    """
    match = _ADDRESS.fullmatch(url)
    if match is None:
        raise _bad(url, "not an object store's address")
    scheme, bucket, path = match[1].lower(), match[2], match[3] or ""
    if "@" in bucket:
        raise _bad(url, "credentials do not belong into an address")
    if "?" in url or "#" in url:
        raise _bad(url, "an address has no query and no fragment")
    if not _BUCKET.fullmatch(bucket):
        raise _bad(url, "an address names a bucket")
    prefix = path.removesuffix("/")
    segments = prefix.split("/") if path else []
    for segment in segments:
        if not _SEGMENT.fullmatch(segment) or segment in (".", ".."):
            raise _bad(url, "a prefix has no such part", part=segment.partition("?")[0])
    if len(prefix) > _MAX_PREFIX_BYTES:
        raise _bad(url, "a prefix is too long")
    return Address(scheme, bucket, prefix)


def _bad(url: str, why: str, **facts: str) -> SettingsError:
    return SettingsError(why, url=shown(url), supported=SUPPORTED, **facts)


def shown(url: str) -> str:
    """A URL without the parts that secrets are put in."""
    return re.sub(r"//[^/]*@", "//", re.split(r"[?#]", url)[0])


def connect(address: Address) -> Client:
    """A client for a place. Nothing is asked yet, unless where an AWS bucket is.

    Raises:
        SettingsError: obstore is not installed, or the environment's settings do not fit together.
    """
    try:
        from obstore.exceptions import BaseError
    except ImportError as error:
        raise SettingsError(
            "object stores need the package obstore", install="pip install 'obstore>=0.12'"
        ) from error
    endpoint = _endpoint(address.scheme)
    options: dict[str, Any] = {
        "prefix": address.prefix or None,
        # Asked again is elsewhere: `RetryingStore`.
        "retry_config": {"max_retries": 0},
        "client_options": _TIMEOUTS | {"allow_http": endpoint.startswith("http://")},
    }
    try:
        return _MAKERS[address.scheme](address.bucket, endpoint, options)
    except BaseError as error:
        cause = str(error).partition("\n")[0]
        raise SettingsError(
            "an object store's settings do not fit", url=address.url, cause=cause
        ) from error
    except BaseException as error:
        if not is_panic(error):
            raise
        raise panicked(address.url) from None


def _endpoint(scheme: str) -> str:
    """The server that the environment names; the cloud's own where it names none."""
    named = [name for name in _ENDPOINTS[scheme] if os.environ.get(name)]
    for name in named:
        _check_endpoint(os.environ[name], name)
    return os.environ[named[0]] if named else ""


def _check_endpoint(endpoint: str, name: str) -> None:
    """Refuse what obstore would take and then not get along with."""
    if "@" in endpoint:
        raise SettingsError("credentials do not belong into an endpoint", variable=name)
    if "?" in endpoint or "#" in endpoint:
        raise SettingsError("an endpoint has no query and no fragment", variable=name)
    try:
        parts = urlsplit(endpoint)
        known = bool(_HTTP.match(endpoint) and parts.hostname and parts.port != 0)
    except ValueError:
        known = False
    if not known or not endpoint.isascii() or re.search(r"[\s\x00-\x1f\x7f]", endpoint):
        raise SettingsError(
            "not an endpoint", variable=name, value=endpoint, supported="https://host:port"
        )


def _s3(bucket: str, endpoint: str, options: dict[str, Any]) -> S3Store:
    from obstore.store import S3Store

    provider = _profile()
    config: dict[str, Any] = {}
    if provider is not None:
        options = options | {"credential_provider": provider}
        config |= provider.config
    # Named by the environment, it outweighs the profile's; asked for only where neither has one.
    named = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    region = named or config.get("region") or (None if endpoint else bucket_region(bucket))
    if region:
        config["region"] = region
    return S3Store(bucket, config=config, **options)  # type: ignore[arg-type]


def _gs(bucket: str, endpoint: str, options: dict[str, Any]) -> GCSStore:
    from obstore.store import GCSStore

    return GCSStore(bucket, **options)


def _az(bucket: str, endpoint: str, options: dict[str, Any]) -> AzureStore:
    from obstore.store import AzureStore

    return AzureStore(bucket, **options)


_MAKERS: dict[str, Callable[[str, str, dict[str, Any]], Client]] = {"s3": _s3, "gs": _gs, "az": _az}


def _profile() -> Any:
    """Credentials of a profile of AWS's configuration files, which only boto3 can read."""
    environment = os.environ
    if any(environment.get(name) for name in _NOT_BY_PROFILE):
        return None
    named = environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE")
    if not named and (any(map(environment.get, _BY_PLATFORM)) or not _has_aws_files()):
        return None
    if importlib.util.find_spec("boto3") is None:
        if named:
            raise SettingsError("AWS profiles need the package boto3", profile=named)
        return None
    from botocore.exceptions import BotoCoreError
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return Boto3CredentialProvider()
    except ValueError:
        return None  # the files hold none: the machine may
    except BotoCoreError as error:
        raise SettingsError(
            "an AWS profile cannot be used", profile=named, cause=str(error)
        ) from error


def _has_aws_files() -> bool:
    # Not by pathlib: a user may have no home, and a folder may be closed.
    return any(
        os.path.exists(os.path.expanduser(os.environ.get(name) or f"~/.aws/{file}"))
        for name, file in (
            ("AWS_SHARED_CREDENTIALS_FILE", "credentials"),
            ("AWS_CONFIG_FILE", "config"),
        )
    )


def bucket_region(bucket: str, *, asked: str = "https://s3.amazonaws.com") -> str | None:
    """Where a bucket of AWS is, which AWS tells anyone; None when it cannot be asked."""
    request = urllib.request.Request(f"{asked}/{bucket}", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=_REGION_S) as answer:
            region = answer.headers.get("x-amz-bucket-region", "")
    except urllib.error.HTTPError as error:
        with error:
            region = error.headers.get("x-amz-bucket-region", "")
    except (OSError, http.client.HTTPException):
        return None
    return region if re.fullmatch(r"[a-z0-9-]+", region) else None
