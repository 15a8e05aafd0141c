"""The trainer's process: it gives way and ties itself to the engine before it loads anything."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """See `trainer.serve` for the arguments."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[-1]):
        return 0  # the engine ended before that
    from vllm_specblock.adapt.trainer.trainer import serve

    return serve(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
