"""Finding the newest record of a log that has no mutable pointer one could trust.

Records are dense and never deleted, so "is there a record `seq`?" is true up to the tail and false
after it. Doubling steps and then bisection find the tail with a number of reads that grows with
the logarithm of the distance; `head`, which anybody may have left behind or forged, only says
where to start.
"""

from __future__ import annotations

import re

from vllm_delta.channel.store import Store
from vllm_delta.errors import DigestError, FormatError
from vllm_delta.format import HEAD_KEY, MAX_MANIFEST_BYTES, MAX_SEQ, manifest_key

MAX_ENVELOPE_BYTES = 2 * MAX_MANIFEST_BYTES
MAX_TAIL_REQUESTS = 2 + 2 * MAX_SEQ.bit_length()
"""Most reads that `find_tail` makes, whatever `head` says: two for the hint, then both searches."""

_MAX_HEAD_BYTES = 64
_HEAD = re.compile(rb'\{"seq":([1-9][0-9]{0,11})\}')


def head_bytes(seq: int) -> bytes:
    return b'{"seq":%d}' % seq


def find_tail(store: Store) -> int:
    """Number of the newest record, 0 on an empty channel. Reads only.

    Raises:
        ChannelError: the store cannot be reached.
    """
    hint = read_head(store)
    low = hint if hint and is_there(store, hint) else 0
    stride = 1
    while low + stride <= MAX_SEQ and is_there(store, low + stride):
        low += stride
        stride *= 2
    high = min(low + stride, MAX_SEQ + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if is_there(store, middle):
            low = middle
        else:
            high = middle
    return low


def is_there(store: Store, seq: int) -> bool:
    """Whether anything stands under the key of `seq`, readable or not."""
    try:
        return store.get(manifest_key(seq), max_bytes=MAX_ENVELOPE_BYTES) is not None
    except (DigestError, FormatError):
        return True


def read_head(store: Store) -> int | None:
    """The record number that `head` names, if it holds one; believed by nobody."""
    try:
        data = store.get(HEAD_KEY, max_bytes=_MAX_HEAD_BYTES)
    except (DigestError, FormatError):
        return None
    match = _HEAD.fullmatch(data) if data else None
    return int(match[1]) if match else None
