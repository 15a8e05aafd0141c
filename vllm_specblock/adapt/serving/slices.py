"""Work that is done in slices between an engine's steps.

A thread is used as a coroutine: it works while the engine's thread waits, and the other way round.
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
"""Seconds between two steps that count as serving at most: an idle engine saves up no more."""


class _Over(BaseException):
    """There are no more slices."""


class Slices:
    """Does some work piece by piece, a piece between two steps where serving can spare it.

    Args:
        work: called again and again; calls `pause` after every piece, and returns whether there was
            anything to do.
        share: of the time between calls of `grant` that pieces may take, on average.
        inside: context of the thread, such as a stream of a GPU.

    Attributes:
        seconds: that pieces took so far.
        error: that ended the work.
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
        """Let a piece be done if the account allows it, between two steps, on the engine's thread.

        A long piece is paid for by those that are not granted after it.

        Returns:
            Whether there was a piece.
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
        """Wait for the next slice, on the work's thread; does not return if there is none."""
        self._paused.release()
        self._go.acquire()
        if self._ends:
            raise _Over

    def close(self) -> None:
        """End the thread."""
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
        except BaseException as error:  # the engine must not wait for more
            self.error = error
            logger.exception(
                "SpecBlock adaptation failed; the engine serves on with the version that it has."
            )
        finally:
            self._paused.release()
