"""A few threads for loops that run without the GIL."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


@functools.cache
def _pool(n_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n_threads, "vllm_delta")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of the threads


def run(work: Callable[[Item], Result], items: Iterable[Item], n_threads: int) -> Sequence[Result]:
    """The results of `work`, in order. The calling thread is one of the `n_threads`."""
    todo = list(items)
    n_threads = min(n_threads, len(todo))
    if n_threads <= 1:
        return [work(item) for item in todo]
    results: list[Result | None] = [None] * len(todo)
    places = iter(range(len(todo)))  # next() on it is atomic
    failed = False

    def draw() -> None:
        nonlocal failed
        try:
            for place in places:
                if failed:
                    return
                results[place] = work(todo[place])
        except BaseException:
            failed = True
            raise

    others = [_pool(n_threads - 1).submit(draw) for _ in range(n_threads - 1)]
    try:
        draw()
    finally:
        # Nothing is left to draw, so whoever has not begun (others may use the pool) need not.
        begun = [other for other in others if not other.cancel()]
        errors = [error for other in begun if (error := other.exception()) is not None]
    if errors:
        raise errors[0]
    return results  # type: ignore[return-value]
