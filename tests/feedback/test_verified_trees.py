"""What follows from verdicts, against one node after the other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.verification import DEPTH, verified_of


@st.composite
def verdicts(draw):
    """Per request a chain of some nodes, its origins, what was run, what was accepted."""
    requests = []
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.integers(0, DEPTH))
        run = draw(st.integers(0, size))
        requests.append(
            SimpleNamespace(
                origin=[draw(st.integers(1, 3)) for _ in range(size)],
                chance=sorted((draw(st.floats(0.01, 1)) for _ in range(size)), reverse=True),
                run=run,
                accepted=draw(st.integers(0, run)),
                temperatures=draw(st.sampled_from([0.0, 0.7])),
            )
        )
    return requests


@settings(deadline=None, max_examples=100)
@given(verdicts())
def test_promised_and_kept_are_of_the_nodes_that_were_run(requests):
    verified = verified_of(requests)
    assert verified.temperature.tolist() == pytest.approx([each.temperatures for each in requests])
    assert verified.live.tolist() == [each.run > 0 for each in requests]
    assert verified.judged.sum(1).tolist() == [each.run for each in requests]
    assert verified.reached.sum(1).tolist() == [each.accepted for each in requests]
    for head in (0, 1):
        expected, accepted, any_of_it = verified.of_drafter(head)
        for index, request in enumerate(requests):
            mine = [node for node, by in enumerate(request.origin) if by & (1 << head)]
            run = [node for node in mine if node < request.run]
            assert bool(any_of_it[index]) == bool(run)
            promised = sum(request.chance[node] for node in run)
            assert float(expected[index]) == pytest.approx(promised, rel=1e-5)
            assert int(accepted[index]) == sum(node < request.accepted for node in run)


def test_placeholders_say_nothing():
    """Drafts that are not ours have no origin, even if they were run and accepted."""
    verified = verified_of(
        [SimpleNamespace(origin=[], chance=[], run=4, accepted=2, temperatures=0.0)]
    )
    assert not verified.live.any() and not verified.judged.any()
    assert all(not values.any() for values in verified.of_drafter(0))
