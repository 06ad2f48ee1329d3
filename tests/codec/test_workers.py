"""The threads that loops are spread over."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from vllm_delta.codec import workers


@pytest.mark.parametrize("n_threads", [1, 2, 3, 7])
def test_results_come_in_order(n_threads: int) -> None:
    """Whoever did the work."""
    assert list(workers.run(lambda n: n * n, range(23), n_threads)) == [n * n for n in range(23)]
    assert list(workers.run(lambda n: n, [], n_threads)) == []


def test_two_threads_work_at_the_same_time() -> None:
    """The calling one is among them."""
    both = threading.Barrier(2)

    def meet(_: int) -> int:
        both.wait(timeout=30)
        return threading.get_ident()

    assert len(set(workers.run(meet, range(2), 2))) == 2
    assert threading.get_ident() in workers.run(meet, range(2), 2)


@pytest.mark.parametrize("bad", [0, 5])
def test_an_error_ends_all_and_is_raised(bad: int) -> None:
    """In whichever thread it comes; the threads can be used again."""

    def work(n: int) -> int:
        if n == bad:
            raise KeyError(n)
        return n

    for _ in range(20):
        with pytest.raises(KeyError):
            workers.run(work, range(9), 3)
    assert list(workers.run(lambda n: n, range(9), 3)) == list(range(9))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own() -> None:
    """Those of its parent are not in it."""
    workers.run(lambda n: n, range(2), 2)
    child = os.fork()
    if child == 0:
        both = threading.Barrier(2)
        status = 1
        try:
            workers.run(lambda _: both.wait(timeout=10), range(2), 2)
            status = 6
        finally:
            os._exit(status)
    deadline = time.monotonic() + 30
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        threading.Event().wait(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 6
