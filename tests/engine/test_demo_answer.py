"""What the demo asks of a real engine: the answer bit by bit, and what it cost."""

from __future__ import annotations

import sys
from pathlib import Path

from vllm import SamplingParams

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_an_answer_comes_bit_by_bit_and_is_plain_vllms(plain, tree, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    sys.modules.pop("demo_engine", None)
    from demo_engine import Answer, answer

    said: list[str] = []
    found = Answer(**answer(tree.llm, "import os", 40, said.append))
    assert 1 < len(said) < len(found.ids)  # a step says as much as was accepted
    tokenizer = tree.llm.get_tokenizer()
    assert "".join(said) == tokenizer.decode(found.ids, skip_special_tokens=True)
    assert found.drafts == len(said) - 1  # before the first token there was no tree
    assert found.accepted == len(found.ids) - len(said)
    assert found.wall > 0 and found.cpu > 0
    params = SamplingParams(temperature=0, max_tokens=40)
    assert plain.generate([found.prompt], params)[0][0].tokens == found.ids
