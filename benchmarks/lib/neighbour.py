"""Another process on the cores: bursts of work with pauses between them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

BURST, PAUSE = 0.4, 0.8
"""Mean seconds of a burst and of a pause; both are exponentially distributed."""


@contextmanager
def neighbour(seed: int) -> Iterator[None]:
    """Occupy every core in bursts; the same seed gives the same bursts."""
    cores = len(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, __file__, str(seed)]) for _ in range(cores)]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()


def bursts(seed: int) -> Iterator[tuple[float, float]]:
    """(pause, burst) in seconds, without end."""
    draw = random.Random(seed)
    while True:
        yield draw.expovariate(1 / PAUSE), draw.expovariate(1 / BURST)


if __name__ == "__main__":
    for pause, burst in bursts(int(sys.argv[1])):
        time.sleep(pause)
        until = time.monotonic() + burst
        while time.monotonic() < until:
            pass
