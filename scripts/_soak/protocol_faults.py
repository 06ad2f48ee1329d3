"""What an actor's calls of a store suffer on the stage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from scripts._soak.protocol_stage import Stage
from vllm_delta.channel.store import Store
from vllm_delta.errors import ChannelError, DeltaError, RateLimitError
from vllm_delta.testing import SimulatedCrash

T = TypeVar("T")

REQUEST = ("transport", "429", "5xx")
"""`ChannelError`, and nothing happened."""
WRITE = ("lost_answer", "late", "twice")
"""It happened, then `ChannelError`; `ChannelError`, and it happens later; it happens twice."""
BLOB = ("corrupt", "truncated", "cut")
_CRASH = 0.01


class StagedStore(Store):
    """A store as one actor sees it: every call is a cue and may fail.

    Args:
        store: the witness.
        rate: chance that a call fails.
        crashes: whether the actor may die at a call.
        damages_manifests: whether manifests may be read damaged too.
    """

    def __init__(
        self,
        stage: Stage,
        store: Store,
        name: str,
        *,
        rate: float,
        crashes: bool = False,
        damages_manifests: bool = False,
    ) -> None:
        self._stage = stage
        self._store = store
        self._name = name
        self._rate = rate
        self._crashes = crashes
        self._damages_manifests = damages_manifests
        self._outage = 0
        self._dead = False
        self.n_calls = 0
        self.crash_at: int | None = None
        self.lands = False

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def atomic(self) -> bool:
        return self._store.atomic

    def put(self, key: str, data: bytes) -> None:
        self._write("put", key, lambda: self._store.put(key, data))

    def put_new(self, key: str, data: bytes) -> bool:
        if self.atomic or self._hit(0.2):
            return self._write("put_new", key, lambda: self._store.put_new(key, data))
        return self._look_write_look(key, data)

    def put_many(self, objects: Mapping[str, bytes]) -> None:
        keys = list(objects)
        what = f"{keys[0]} and {len(keys) - 1} more"
        possible = (*REQUEST, *WRITE, *["partial"] * 4) if len(keys) > 1 else (*REQUEST, *WRITE)

        def part() -> None:
            self._store.put_many({key: objects[key] for key in keys[: len(keys) // 2]})

        self._write("put_many", what, lambda: self._store.put_many(objects), possible, part)

    def get(self, key: str, *, max_bytes: int) -> bytes | None:
        possible: tuple[str, ...] = REQUEST
        if self._damages_manifests and key.startswith("m/"):
            possible = (*REQUEST, "corrupt_manifest")
        fault = self._begin("get", key, possible)
        data = self._store.get(key, max_bytes=max_bytes)
        self._stage.note(f"{self._name}   {'nothing' if data is None else f'{len(data)} bytes'}")
        return self._flipped(data) if fault == "corrupt_manifest" and data else data

    def stream(self, key: str, *, max_bytes: int, start: int = 0) -> Iterator[bytes] | None:
        fault = self._begin("stream", f"{key} from {start}", (*REQUEST, *BLOB))
        pieces = self._store.stream(key, max_bytes=max_bytes, start=start)
        if pieces is None:
            return None
        data = b"".join(pieces)
        if fault == "corrupt" and data:
            data = self._flipped(data)
        elif fault == "truncated":
            data = data[: self._stage.draw.randrange(len(data) + 1)]
        return self._pieces(data, cut=fault == "cut")

    def delete(self, keys: Iterable[str]) -> None:
        listed = tuple(keys)
        what = f"{listed[0]} and {len(listed) - 1} more" if listed else "nothing"
        self._write("delete", what, lambda: self._store.delete(listed))

    def list(self, prefix: str) -> list[str]:
        fault = self._begin("list", prefix, (*REQUEST, "stale_list"))
        keys = self._store.list(prefix)
        if fault == "stale_list" and keys:
            for _ in range(self._stage.draw.randint(1, 3)):
                if keys:
                    keys.pop(self._stage.draw.randrange(len(keys)))
        return keys

    def _look_write_look(self, key: str, data: bytes) -> bool:
        """As a store without a conditional write does it: others come in between."""
        if self._hit(self._rate) and not self._stage.calm:
            fault = self._stage.draw.choice((*REQUEST, "lost_answer", "late"))
        else:
            fault = ""
        self._begin("put_new", key, ())
        if fault in REQUEST:
            self._fail(fault, key)
        if self._store.get(key, max_bytes=1 << 22) is not None:
            return False
        self._cue("put_new, write", key, away=True)
        if fault:
            self._count(fault)
        if fault == "late":
            self._stage.send_late(lambda: self._store.put(key, data))
            raise ChannelError("simulated time-out", key=key)
        self._store.put(key, data)
        if fault:
            raise ChannelError("simulated loss of the answer", key=key)
        self._cue("put_new, look", key, away=True)
        return self._store.get(key, max_bytes=1 << 22) == data

    def _write(
        self,
        call: str,
        key: str,
        write: Callable[[], T],
        possible: tuple[str, ...] = (*REQUEST, *WRITE),
        part: Callable[[], None] | None = None,
    ) -> T:
        fault = self._begin(call, key, possible, write)

        def again() -> None:
            with contextlib.suppress(DeltaError):
                write()

        if fault == "partial" and part is not None:
            part()
            raise ChannelError("simulated error after a part", key=key)
        if fault == "late":
            self._stage.send_late(again)
            raise ChannelError("simulated time-out", key=key)
        answer = write()
        if fault == "twice":
            self._stage.send_late(again)
        elif fault == "lost_answer":
            raise ChannelError("simulated loss of the answer", key=key)
        return answer

    def _begin(
        self,
        call: str,
        key: str,
        possible: tuple[str, ...],
        write: Callable[[], object] | None = None,
    ) -> str:
        """The call's fault, of the possible ones that are not told by an exception."""
        self._cue(call, key, write)
        draw = self._stage.draw
        if self._stage.calm or not possible:
            return ""
        if self._outage:
            self._outage -= 1
            self._fail("transport", key)
        if not self._hit(self._rate):
            return ""
        if self._hit(0.03):
            self._outage = draw.randint(5, 40)
            self._count("outage")
        fault = draw.choice(possible)
        if fault in REQUEST:
            self._fail(fault, key)
        self._count(fault)
        return fault

    def _cue(
        self,
        call: str,
        key: str,
        write: Callable[[], object] | None = None,
        *,
        away: bool = False,
    ) -> None:
        # On its way a request may be overtaken by several of another's.
        under_way_s = self._stage.draw.choice((0.0, 0.0, 0.3, 2.0)) if away else 0.0
        self._stage.cue(under_way_s, away=away)
        if self._dead:
            raise SimulatedCrash(key)
        self._stage.note(f"{self._name} {call} {key[:24]}")
        here = self.n_calls == self.crash_at
        self.n_calls += 1
        drawn = self._crashes and not self._stage.calm and self._hit(_CRASH)
        if here or drawn:
            self._dead = True
            self._count("crash")
            lands = self.lands if here else self._hit(0.5)
            if lands and write is not None:
                with contextlib.suppress(DeltaError):
                    write()
            raise SimulatedCrash(key)

    def _fail(self, fault: str, key: str) -> None:
        self._count(fault)
        if fault == "429":
            after = self._stage.draw.choice([{}, {"retry_after_s": 2.0}, {"retry_after_s": 900.0}])
            raise RateLimitError("simulated 429", key=key, **after)
        raise ChannelError(f"simulated {fault}", key=key)

    def _pieces(self, data: bytes, *, cut: bool) -> Iterator[bytes]:
        half = len(data) // 2
        if data[:half]:
            yield data[:half]
        if cut:
            raise ChannelError("simulated end of a connection")
        self._cue("stream, on", "")
        yield data[half:]

    def _flipped(self, data: bytes) -> bytes:
        place = self._stage.draw.randrange(len(data))
        flipped = data[place] ^ self._stage.draw.randint(1, 255)
        return data[:place] + bytes([flipped]) + data[place + 1 :]

    def _hit(self, chance: float) -> bool:
        return self._stage.draw.random() < chance

    def _count(self, fault: str) -> None:
        self._stage.faults[fault] += 1
        self._stage.note(f"{self._name}   {fault}")
