"""Trees by the rank head and by others, replayed along the same texts."""

from __future__ import annotations

import pytest
import rank_guidance
import torch
from branchings import ORACLE, UNIFORM
from support.engines import DRAFTER, TARGET

from vllm_specblock.train.config import TrainError
from vllm_specblock.train.eval.evaluate import sequences_from
from vllm_specblock.train.target.features import load_target


@pytest.fixture
def texts(monkeypatch):
    def answered(target, questions, count, tokens, sampling_temperature, layers):
        model = load_target(target, "fp32", torch.device("cpu"))
        prompts = [torch.arange(5, 25), torch.arange(40, 60)]
        return list(
            sequences_from(
                model, prompts, tokens, temperature=sampling_temperature, layer_ids=layers
            )
        )

    monkeypatch.setattr(rank_guidance, "answered", answered)


def test_every_tree_at_every_temperature(texts):
    rows = rank_guidance.measure(DRAFTER, TARGET, [], 1, 16, [6], 1)
    names = [row["tree"] for row in rows if row["T"] == 0]
    assert len(rows) == 2 * len(names) and names[0] == "rank-guided, as served"
    assert {UNIFORM, ORACLE, f"{UNIFORM}, width 32"} < set(names)
    assert all(row["tau"] >= 1 and row["nodes"] <= 6 and row["steps"] > 0 for row in rows)
    text = rank_guidance.table(rows)
    assert text.splitlines()[0] == "| tree | N = 6, T = 0 | N = 6, T = 1 |"
    assert len(text.splitlines()) == 2 + len(names)


def test_answers_that_are_too_short_are_one_sentence(texts):
    with pytest.raises(TrainError, match="No text is long enough to draft along"):
        rank_guidance.measure(DRAFTER, TARGET, [], 1, 4, [6], 1)
