"""Drafters: what yields a draft tree for every request. Plain torch."""

from importlib.metadata import entry_points
from logging import getLogger

import vllm_specblock.drafters.options  # noqa: F401 (registers our drafters)

ENTRY_POINTS = "vllm_specblock.drafters"
"""Entry point group of other packages' drafters: each names the module of a kind's options."""

for _entry in entry_points(group=ENTRY_POINTS):
    try:
        _entry.load()
    except Exception:  # of a package that is not ours: vLLM has to start without it
        getLogger(__name__).exception("The drafters of entry point %r are left out.", _entry.name)
