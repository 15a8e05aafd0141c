"""One thread for every test, decided before torch is imported.

vLLM in this process runs many small operations from one thread; a second one in torch's pool only
spins beside it, at up to ten times the time per step.
"""

from __future__ import annotations

import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)


# vLLM runs the garbage collector ten times per engine start: half a second each with its modules.
gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()
