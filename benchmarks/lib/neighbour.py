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
def neighbour() -> Iterator[None]:
    """Occupy all cores in bursts."""
    command = [sys.executable, __file__, str(os.getpid())]
    busy = [subprocess.Popen(command) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()


if __name__ == "__main__":
    draw = random.Random(0)  # the same in all of them: a burst takes all cores at once
    while os.getppid() == int(sys.argv[1]):  # the benchmark may be killed
        time.sleep(draw.expovariate(1 / PAUSE))
        until = time.monotonic() + draw.expovariate(1 / BURST)
        while time.monotonic() < until:
            pass
