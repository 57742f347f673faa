"""TurnLock: one thread at a time, in the order of their requests."""

from __future__ import annotations

import threading

from libs.engine.step.turn_lock import TurnLock


def test_threads_enter_in_the_order_in_which_they_asked() -> None:
    lock, entered, threads = TurnLock(), list[int](), list[threading.Thread]()

    def enter(number: int) -> None:
        with lock:
            entered.append(number)

    with lock:
        for number in range(8):
            threads.append(threading.Thread(target=enter, args=(number,)))
            threads[-1].start()
            while lock._drawn < number + 2:  # it has asked
                pass
        assert not entered
    for thread in threads:
        thread.join(10)
    assert entered == list(range(8))


def test_an_error_frees_the_lock() -> None:
    lock = TurnLock()
    for _ in range(3):
        try:
            with lock:
                raise RuntimeError
        except RuntimeError:
            pass
