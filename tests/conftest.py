"""One thread for every test, decided before torch is imported. Workers wait until this is read.

vLLM in this process runs many small operations from one thread; a second one in torch's pool only
spins beside it, at up to ten times the time per step.
"""

from __future__ import annotations

import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"
# Of processes that tests start; last, since the emulated GPU has a `sitecustomize.py` of its own.
paths = os.environ.get("PYTHONPATH"), os.path.join(os.path.dirname(__file__), "lib/startup")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

# vLLM runs the garbage collector ten times per engine start: half a second each with its modules.
gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()
