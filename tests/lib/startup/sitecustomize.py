"""Garbage collection in Python processes that tests start: none until the first explicit one, at
which all that was imported is set aside for good. Else it takes a third of an engine's start."""

import gc


def first_collect(*generation: int) -> int:
    gc.freeze()
    gc.enable()
    gc.collect = collect
    return collect(*generation)


collect, gc.collect = gc.collect, first_collect
gc.disable()
