"""Drafters: what yields a draft tree for every request. Plain torch."""

from importlib import import_module
from importlib.metadata import entry_points
from logging import getLogger

ENTRY_POINTS = "vllm_specblock.drafters"
"""Entry point group of other packages' drafters: each names the module of a kind's options."""

# Imports options only, which register their kinds; no drafter is loaded.
for _folder in ("specblock", "eagle3", "dflash", "ngram"):
    import_module(f"{__name__}.{_folder}.options")
for _entry in entry_points(group=ENTRY_POINTS):
    try:
        _entry.load()
    except Exception:  # of a package that is not ours: vLLM has to start without it
        getLogger(__name__).exception("The drafters of entry point %r are left out.", _entry.name)
