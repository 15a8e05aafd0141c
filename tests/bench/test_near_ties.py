"""Greedy answers that differ from plain vLLM's, each found once, and bfloat16's step."""

from __future__ import annotations

import json

import pytest
import torch

from vllm_specblock.bench import near_ties
from vllm_specblock.bench.near_ties import differences
from vllm_specblock.bench.results import plain_of, write_results
from vllm_specblock.bench.run import measure


@pytest.mark.parametrize("value", [0.37, 1.0, 1.99, 2.0, 17.3, -130.0])
def test_a_step_is_where_torch_rounds(value):
    there = torch.tensor(abs(value)).to(torch.bfloat16)
    after = torch.nextafter(there, torch.tensor(1e9, dtype=torch.bfloat16))
    assert near_ties.bfloat16_step(value) == (after - there).item()


def measured(make_bench, **changes):
    bench = make_bench({"ours": {}, "other": {"shift": 7}}, **changes)
    measure(bench, lambda _: None)
    return bench


def test_every_one_is_found_once(make_bench):
    bench = measured(make_bench, rounds=2, questions=2)
    found = differences(bench, plain_of(bench))
    # Second turns of the chats come after other answers: there is nothing to compare.
    assert found.keys() == {
        ("other", "chats", "a"),
        ("other", "chats", "b"),
        ("other", "single", "q0"),
        ("other", "single", "q2"),
    }
    for _, plain, ours in found.values():
        assert len(plain) == len(ours) == 4
        assert all(b - a == 7 for a, b in zip(plain, ours))


def test_the_page_says_how_close_the_tokens_were(make_bench):
    bench = measured(make_bench, questions=1)
    text, _ = write_results(bench)
    assert "## Greedy answers that differ from plain vLLM's" in text
    assert "- other, single/q0: token 0: " in text
    facts = json.loads((bench.config.out / "results.json").read_text())["near_ties"]
    assert len(facts) == 2 and all(each["steps"] > 0 for each in facts)
    silent = make_bench({"ours": {}, "other": {"shift": 7}}, questions=1, explain=False)
    assert "Greedy answers" not in write_results(silent)[0]
