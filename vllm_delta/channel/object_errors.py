"""What an object store's client says, as errors of ours.

obstore tells few errors apart by class; for the others the HTTP status and the store's own code
are in the text, and there only. The answer's header is not, so that `Retry-After` is not seen.
"""

from __future__ import annotations

import re

from vllm_delta.errors import (
    AuthError,
    ChannelError,
    ChannelFullError,
    DeltaError,
    NotFoundError,
    RateLimitError,
    SettingsError,
)

_STATUS = re.compile(r"status code: ([0-9]{3})\b")
_CODE = re.compile(r"<Code>\s*([A-Za-z0-9_.]{1,64})\s*</Code>|\(code: ([A-Za-z0-9_.]{1,64})\)")
_REGION = re.compile(r"<Region>([a-z0-9-]{1,32})</Region>")
_KIND = re.compile(r"\bkind: (Connect|Timeout|Interrupted|Request|Decode)\b")
_REQUEST = re.compile(r"Error performing [A-Z]+ (\S+)")

_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted"}
_FULL = {"QuotaExceeded", "XMinioStorageFull"}
_SLOW = {"SlowDown", "SlowDownRead", "SlowDownWrite", "ServerBusy", "TooManyRequests"}
_EXPIRED = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired"}
_ELSEWHERE = {"PermanentRedirect", "AuthorizationHeaderMalformed", "TemporaryRedirect"}
_NOWHERE = "redirect without LOCATION"
_UNABLE = {"InvalidBucketName", "NotImplemented", "MethodNotAllowed"}

_PANIC = "PanicException"
_LOOK_AT = (
    "credentials, region and endpoint in the environment (AWS_*, AZURE_*, GOOGLE_*), proxies: "
    "a line break at an end, or a character that no header takes"
)


def is_panic(error: BaseException) -> bool:
    """Whether obstore gave up without an error of its own. No `Exception`, and has no module."""
    return type(error).__name__ == _PANIC


def panicked(url: str) -> SettingsError:
    """The error to raise for a panic, whose text may quote what made it: it is not repeated."""
    return SettingsError("the store's settings do not work", url=url, look_at=_LOOK_AT)


class Answer:
    """What can be read from an error of obstore."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self._text = str(error)
        status = _STATUS.search(self._text)
        self.status = int(status[1]) if status else 0
        code = _CODE.search(self._text)
        self.code = (code[1] or code[2]) if code else ""

    @property
    def lacks_object(self) -> bool:
        """Whether it is the object that is not there, and not the bucket."""
        return isinstance(self._error, FileNotFoundError) and self.code not in _NO_BUCKET

    @property
    def is_conflict(self) -> bool:
        """Whether another write was under way, and nothing is known to stand there."""
        return self.code in ("ConditionalRequestConflict", "OperationAborted")

    def typed(self, url: str, key: str, *, bucket: str, has_worked: bool) -> DeltaError:
        """The error to raise.

        Args:
            has_worked: some request did: what fails to give credentials now gave them before.
        """
        facts = {"url": url, **({"key": key} if key else {}), "cause": self._cause()}
        if self._is_about_credentials(bucket) and not (has_worked and self._may_pass()):
            return AuthError("no credentials for the channel's store", **facts)
        if self.status == 507 or self.code in _FULL:
            return ChannelFullError("no room left in the channel's store", **facts)
        if self.status == 429 or self.code in _SLOW:
            return RateLimitError("the channel's store asks for fewer requests", **facts)
        if self._is_denied():
            return AuthError("not allowed in the channel's store", **facts)
        if self.status == 404 or self.code in _NO_BUCKET:
            return NotFoundError("the channel's bucket is not there", **facts)
        # A 301 of S3 names no place to go to, and obstore then says only that.
        if self.code in _ELSEWHERE or self.status in (301, 307, 308) or _NOWHERE in self._text:
            region = _REGION.search(self._text)
            facts |= {"region": region[1]} if region else {}
            return SettingsError("the bucket is in another region; set AWS_REGION", **facts)
        if self.code in _UNABLE or self.status in (405, 501) or self._says("NotSupportedError"):
            return SettingsError("the channel's store cannot do this", **facts)
        return ChannelError("the channel's store cannot be used", **facts)

    def _is_denied(self) -> bool:
        return (
            self.status in (401, 403)
            or self.code in _EXPIRED | {"AccessDenied"}
            or self._says("PermissionDeniedError", "UnauthenticatedError")
        )

    def _is_about_credentials(self, bucket: str) -> bool:
        """Whether it was not the store that failed, but what is asked for credentials."""
        if self._says("UnauthenticatedError") and not self.status:
            return True  # a provider of ours: boto3
        request = _REQUEST.search(self._text)
        if request is None:
            return "token file" in self._text
        if "token request" in self._text:
            return True
        # obstore hides addresses that hold secrets: STS's, and Azure's with a shared signature.
        if request[1] == "REDACTED":
            return self._text.startswith("Generic S3")
        return bucket not in request[1] or "//169.254." in request[1]

    def _may_pass(self) -> bool:
        return self.status == 0 or self.status == 429 or self.status >= 500

    def _says(self, *names: str) -> bool:
        return type(self._error).__name__ in names

    def _cause(self) -> str:
        if self.status:
            return f"{self.status} {self.code}".strip()
        if self.code:
            return self.code
        kind = _KIND.search(self._text)
        said = self._text.partition("\n")[0].rpartition(" - ")[2]
        said = re.sub(r"\?\S*", "", said)[:200]
        return f"{said} ({kind[1]})" if kind else said
