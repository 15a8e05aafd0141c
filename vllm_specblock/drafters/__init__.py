"""Drafters: what yields a draft tree for every request. Plain torch."""

from importlib import import_module

for _folder in ("specblock", "eagle3", "dflash", "jetspec", "baselines", "ngram"):
    # Registers the kinds of drafters in there; loads none of them.
    import_module(f"{__name__}.{_folder}.options")
