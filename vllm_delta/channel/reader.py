"""Reading a channel's log and its blobs, each byte checked before it is believed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

from vllm_delta.channel.cache import BlobCache, Object
from vllm_delta.channel.chain import Record, parse_record, verify_link
from vllm_delta.channel.keys import NO_KEYS, Keys, about_blob, about_schema
from vllm_delta.channel.store import Store
from vllm_delta.channel.tail import MAX_ENVELOPE_BYTES, find_tail, is_there, read_head
from vllm_delta.errors import ChainError, ChannelError, DigestError
from vllm_delta.format import MAX_SEQ, BlobRef, Manifest, blob_key, manifest_key

SALT_BYTES = 8
"""At the end of each blob's object, so that no two writes are of one object; see `FORMAT.md`."""


HASHED_BESIDE = 4 << 20
"""From this size on a blob is hashed beside its transfer, or beside its copying."""


class LogReader:
    """Reads a log's records and blobs. Keeps no state: safe from any thread, blocks on the store.

    Nothing is retried here, and nothing but blobs is cached.

    Args:
        store: where the channel lives.
        keys: what manifests must be signed and blobs sealed with.
        cache: keeps blobs for other readers on this machine.
    """

    def __init__(
        self, store: Store, *, keys: Keys = NO_KEYS, cache: BlobCache | None = None
    ) -> None:
        self.store = store
        self.keys = keys
        self._cache = cache

    def read(self, seq: int) -> Record | None:
        """The record with this number, parsed strictly, or None when there is none.

        Raises:
            FormatError, UnsupportedError, DigestError: what stands there is not a manifest.
            ChainError: it is the manifest of another place; `SignatureError`: not a trusted one.
            ChannelError: the store cannot be reached.
        """
        if not 1 <= seq <= MAX_SEQ:
            return None
        envelope = self.store.get(manifest_key(seq), max_bytes=MAX_ENVELOPE_BYTES)
        return None if envelope is None else parse_record(envelope, seq, self.keys)

    def tail(self) -> Record | None:
        """The newest record, or None on an empty channel. Not yet verified against the chain.

        Makes at most `MAX_TAIL_REQUESTS` + 1 reads, whatever stands under `head`.
        """
        seq = find_tail(self.store)
        if seq == 0:
            return None
        record = self.read(seq)
        if record is None:
            raise ChannelError("a record vanished while it was read", seq=seq)
        return record

    def read_next(self, previous: Record | None, *, hinted: bool = True) -> Record | None:
        """The verified record after `previous` (None: the log's first), or None: nothing new.

        Args:
            hinted: whether to see by `head` that a record is missing, where none is found. Who
                has just found one need not: the next look will tell.

        Raises:
            ChainError: it does not continue `previous`, or it is missing though there are later
                ones, which `head` shows.
        """
        seq = 1 if previous is None else previous.seq + 1
        record = self.read(seq)
        if record is None:
            hint = read_head(self.store) if hinted else None
            if hint is None or hint < seq:
                return None
            # Perhaps it came since; else `head` is believed only if it names a record.
            record = self.read(seq)
            if record is None:
                if hint > seq and is_there(self.store, hint):
                    raise ChainError("a record is missing from the chain", seq=seq, last=hint)
                return None
        verify_link(previous, record)
        return record

    def read_chain(
        self, first: int, last: int, *, previous: Record | None = None
    ) -> Iterator[Record]:
        """Read the records `first` to `last`, each verified against the one before.

        Args:
            previous: an already verified record `first` - 1. Without it a chain that begins after
                record 1 must begin with an anchor, which needs nothing before it.

        Raises:
            ChainError: a record is missing, or does not continue the one before.
        """
        if previous is not None and previous.seq != first - 1:
            raise ValueError(f"previous is record {previous.seq}, not {first - 1}")
        for seq in range(first, last + 1):
            record = self.read(seq)
            if record is None:
                raise ChainError("a record is missing from the chain", seq=seq, last=last)
            if previous is not None or seq == 1:
                verify_link(previous, record)
            elif record.manifest.kind != "anchor":
                raise ChainError("not an anchor", seq=seq, kind=record.manifest.kind)
            yield record
            previous = record

    def read_from_anchor(self, tail: Record) -> list[Record]:
        """The verified chain from `tail`'s newest anchor (without one: from record 1) to `tail`.

        Raises:
            ChainError: the chain does not verify or does not end in `tail`.
        """
        records = list(self.read_chain(tail.manifest.anchor or 1, tail.seq))
        if records[-1].digest != tail.digest:
            raise ChainError("a record was replaced while the chain was read", seq=tail.seq)
        return records

    def get_blob(self, manifest: Manifest, place: int) -> bytes | memoryview:
        """Fetch a record's blob and check it; `place` is its place in the manifest.

        Returns:
            Its bytes, perhaps as a view of what was fetched.

        Raises:
            DigestError: it is missing, or its size or sha256 is not the manifest's.
            SettingsError: it is sealed and the key is not at hand, or the other way round.
        """
        about = about_blob(manifest.channel, manifest.seq, place)
        return self.keys.open(self._fetch(manifest.blobs[place]), about, drop_bytes=SALT_BYTES)

    def get_schema(self, manifest: Manifest) -> bytes:
        """Fetch the schema that a record names and check it; errors as of `get_blob`."""
        assert manifest.schema is not None
        return bytes(self.keys.open(self._fetch(manifest.schema), about_schema(manifest.channel)))

    def _fetch(self, ref: BlobRef) -> Object:
        if self._cache is None:
            return self._load(ref)
        return self._cache.fetch(ref, lambda: self._load(ref))

    def _load(self, ref: BlobRef) -> Object:
        """A blob's object, from the store, with the right digest."""
        key = blob_key(ref.sha256)
        stream = self.store.stream(key, max_bytes=ref.n_bytes)
        if stream is None:
            raise DigestError("a blob is missing", key=key)
        hasher = hashlib.sha256()
        update = hasher.update
        # Beside the transfer: sha256 takes about as long as a fast store does.
        with ThreadPoolExecutor(1) if ref.n_bytes > HASHED_BESIDE else nullcontext() as thread:
            data, n_bytes = _gathered(
                stream,
                ref.n_bytes,
                update if thread is None else lambda piece: thread.submit(update, piece),
            )
        if n_bytes != ref.n_bytes:
            raise DigestError(
                "a blob has the wrong size", key=key, expected=ref.n_bytes, actual=n_bytes
            )
        if (actual := hasher.hexdigest()) != ref.sha256:
            raise DigestError(
                "a blob has the wrong digest", key=key, expected=ref.sha256, actual=actual
            )
        return data


def _gathered(
    pieces: Iterator[bytes], n_bytes: int, hash_piece: Callable[[bytes], object]
) -> tuple[Object, int]:
    """An object of pieces, and its size; given up as soon as it is larger than `n_bytes`."""
    first = next(pieces, b"")
    hash_piece(first)
    if len(first) >= n_bytes:
        return first, len(first) + len(next(pieces, b""))
    # Grown as they come: to join them in the end would take as long again.
    data = bytearray(first)
    for piece in pieces:
        if len(data) + len(piece) > n_bytes:
            return data, len(data) + len(piece)
        hash_piece(piece)
        data += piece
    return data, len(data)
