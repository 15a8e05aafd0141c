"""Work that is done in slices between an engine's steps.

A thread is used as a coroutine: it works while the engine's thread waits, and waits while that one
serves. So only one of both ever runs, their order is always the same, and neither needs a lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

logger = logging.getLogger("vllm.specblock")

SHARE = 0.03
"""Of serving's time that slices may take."""

LONGEST = 1.0
"""Seconds between two steps that count as serving at most: an engine without requests saves up
no more."""


class _Over(BaseException):
    """There will be no more slices; nothing on the way catches it."""


class Slices:
    """Does some work piece by piece, a piece between two steps where serving can spare it.

    Args:
        work: does something and calls `pause` behind every piece of it; returns whether there was
            anything to do. It is called again and again.
        share: of the time between calls of `grant` that pieces may take, on average.
        inside: what the thread works in, such as a stream of a GPU.
        clock: seconds.

    Attributes:
        seconds: that pieces took so far.
        error: what the work failed with; it is never called again.
    """

    def __init__(
        self,
        work: Callable[[], bool],
        share: float = SHARE,
        inside: Callable[[], AbstractContextManager[object]] = nullcontext,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._work, self._share, self._inside, self._clock = work, share, inside, clock
        self.seconds = 0.0
        self.error: BaseException | None = None
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._account, self._granted = 0.0, clock()
        self._ends = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="specblock-slices")
        self._thread.start()

    def grant(self) -> bool:
        """Between two steps, on the engine's thread: let a piece be done if the account allows it.

        What a piece took is known when it is done, so a long one is paid for by those after it.

        Returns:
            whether there was a piece.
        """
        now = self._clock()
        spare = self._share * min(LONGEST, now - self._granted)
        self._account = min(self._share * LONGEST, self._account + spare)
        self._granted = now
        if self._account < 0 or self.error is not None or self._ends:
            return False
        self._go.release()
        self._paused.acquire()
        ended = self._clock()
        self._account -= ended - now
        self.seconds += ended - now
        self._granted = ended
        return True

    def pause(self) -> None:
        """Behind a piece of work, on its thread: wait until serving can spare another. Where there
        will be none, it does not return."""
        self._paused.release()
        self._go.acquire()
        if self._ends:
            raise _Over

    def close(self) -> None:
        """No more pieces; the thread ends."""
        if not self._ends:
            self._ends = True
            self._go.release()
            self._thread.join()

    def _run(self) -> None:
        self._go.acquire()
        try:
            with self._inside():
                while not self._ends:
                    if not self._work():
                        self.pause()
        except _Over:
            pass
        except BaseException as error:  # whatever ended it, the engine must not wait for more
            self.error = error
            logger.exception(
                "SpecBlock adaptation failed; the engine serves on with the version that it has."
            )
        finally:
            self._paused.release()
