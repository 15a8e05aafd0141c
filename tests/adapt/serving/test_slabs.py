"""Slabs against plain lists: a record matches its request's text."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.slab_traffic import HIDDEN, Engine, serve, serve_late

from vllm_specblock.adapt.serving.slabs import Slabs


@pytest.mark.parametrize("late", [False, True], ids=["host", "late device"])
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30), length=st.integers(1, 120))
def test_records_are_what_was_said(late, seed, length):
    """Late: of a device that is behind."""
    serve_late(seed, length) if late else serve(Engine(seed), length)


@pytest.mark.parametrize("late", [False, True], ids=["host", "late device"])
def test_everything_happens_in_it(late):
    """What the properties are worth: all that can happen did."""
    streams = (serve_late(n, 300) if late else serve(Engine(n), 300) for n in range(12))
    seen = sum(streams, Counter())  # without what never happened
    wanted = {"records", "moved", "ran out", "no slab", "resumed", "cached", "stopped"}
    assert seen.keys() == wanted | ({"on the way", "moved early"} if late else set())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_record_has_the_dtype_of_the_target(dtype):
    slabs = Slabs(2, HIDDEN, dtype, slabs=1, rows=80)
    assert slabs.begin(0, "a", prompt=1, computed=0, now=0.0)
    assert not slabs.begin(1, "b", prompt=1, computed=0, now=0.0), "there is one slab"
    slabs.tensors.end[0] += 3
    assert slabs.end(0, now=1.0)
    ((record, finished, last),) = slabs.arrived()
    assert record.states.dtype == record.last.dtype == dtype and len(record.tokens) == 3
    assert last and finished is None, "nothing was drafted for it"
    assert not slabs.end(0, now=1.0) and slabs.begin(1, "b", prompt=1, computed=0, now=0.0)
