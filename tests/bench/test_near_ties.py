"""Greedy answers that differ from plain vLLM's, each found once, and bfloat16's step."""

from __future__ import annotations

import json

import pytest
import torch

from vllm_specblock.bench import near_ties
from vllm_specblock.bench.results import write_results
from vllm_specblock.bench.run import measure


@pytest.mark.parametrize("value", [0.37, 1.0, 1.99, 2.0, 17.3, -130.0])
def test_a_step_is_where_torch_rounds(value):
    there = torch.tensor(abs(value)).to(torch.bfloat16)
    after = torch.nextafter(there, torch.tensor(1e9, dtype=torch.bfloat16))
    assert near_ties.bfloat16_step(value) == (after - there).item()


def test_every_difference_is_found_once_and_explained(make_bench):
    fakes = {"ours": {}, "other": {"shift": 7}}
    bench = make_bench(fakes, rounds=2, questions=2)
    measure(bench, lambda _: None)
    text, _ = write_results(bench)
    assert "## Greedy answers that differ from plain vLLM's" in text
    assert "- other, single/q0: token 0: " in text
    facts = json.loads((bench.config.out / "results.json").read_text())["near_ties"]
    # Second turns of the chats come after other answers: there is nothing to compare.
    where = [(each["method"], each["set"], each["question"]) for each in facts]
    chats, single = (
        (("other", "chats", q) for q in "ab"),
        (("other", "single", f"q{n}") for n in (0, 2)),
    )
    assert sorted(where) == [*chats, *single]
    assert all(each["steps"] > 0 for each in facts)
    silent = make_bench(fakes, rounds=2, questions=2, explain=False)
    assert "Greedy answers" not in write_results(silent)[0]
