"""KV policy: which requests may use KV that was computed under older weights."""

from __future__ import annotations

import uuid
from typing import Any

from vllm.v1.request import Request, RequestStatus

from vllm_delta.format import Version


class KvAges:
    """Knows under which version each request was admitted, and keeps their KV apart.

    Under ``fresh`` a request's cache salt gets the commit's own prefix at admission, so block
    hashes of different commits never meet, also not after a rollback to the same version. A
    request that still waits at a commit is salted again. Running requests keep their context.

    Args:
        core: vLLM's ``EngineCore``; its admission is wrapped on this instance.
        salted: whether to salt (policy ``fresh``) or only to count ages.
    """

    def __init__(self, core: Any, *, salted: bool) -> None:
        self._core = core
        self.salted = salted
        # Unguessable, so that no request's own salt can name an older commit's KV.
        self._secret = uuid.uuid4().hex
        self._n_commits = 0
        self._prefix = ""
        self._number: int | None = None
        self._pending: dict[str, int] = {}
        self._preprocess = core.preprocess_add_request
        self._add = core.add_request
        core.preprocess_add_request = self._preprocess_salted
        core.add_request = self._add_salted

    def turn(self, version: Version, *, recomputed: bool) -> None:
        """Starts the KV of a commit, on the core's thread and before the next step.

        Args:
            version: what is resident now.
            recomputed: all older KV was dropped, running requests start over.
        """
        self._n_commits += 1
        self._number = version.number
        if self.salted:
            self._prefix = f"{self._secret} {self._n_commits}|"
        for request in self._core.scheduler.requests.values():
            if recomputed:
                request._delta_number = self._number
            elif _is_untouched(request):
                self._admit(request)

    def expect_recompute(self) -> None:
        """Notes the requests that start over, just before their KV is dropped."""
        for request in self._core.scheduler.requests.values():
            if request.num_computed_tokens:
                self._pending[request.request_id] = request.num_computed_tokens

    @property
    def n_recomputing(self) -> int:
        """How many requests have not got back to where the last reset caught them."""
        requests = self._core.scheduler.requests
        for name, n_tokens in list(self._pending.items()):
            if name not in requests or requests[name].num_computed_tokens >= n_tokens:
                del self._pending[name]
        return len(self._pending)

    @property
    def oldest(self) -> int:
        """How many versions old the KV of the oldest unfinished request is."""
        numbers = [
            request._delta_number
            for request in self._core.scheduler.requests.values()
            if getattr(request, "_delta_number", None) is not None
        ]
        return 0 if self._number is None else max(0, self._number - min([*numbers, self._number]))

    def _preprocess_salted(self, request: Any) -> tuple[Request, int]:
        # On vLLM's input thread: hashing there keeps it off the engine's.
        prefix, user = self._prefix, request.cache_salt
        if prefix:
            request.cache_salt = f"{prefix}{user or ''}"
        ready, wave = self._preprocess(request)
        ready._delta_salt = (prefix, user)
        return ready, wave

    def _add_salted(self, request: Request, request_wave: int = 0) -> None:
        self._admit(request)
        self._add(request, request_wave)

    def _admit(self, request: Request) -> None:
        request._delta_number = self._number
        prefix, user = getattr(request, "_delta_salt", ("", request.cache_salt))
        if prefix == self._prefix:
            return
        request._delta_salt = (self._prefix, user)
        request.cache_salt = f"{self._prefix}{user or ''}"
        if request.block_hashes:
            request.block_hashes.clear()
            request.update_block_hashes()


def _is_untouched(request: Request) -> bool:
    """Whether nothing of the request was computed yet, nor fetched from elsewhere."""
    return (
        request.num_computed_tokens == 0
        and request.num_output_tokens == 0
        and request.num_preemptions == 0
        and request.status
        in (RequestStatus.WAITING, RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
    )
