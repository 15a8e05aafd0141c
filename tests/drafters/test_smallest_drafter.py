"""The drafter that docs/extending.md shows is complete."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from support.committed import zero_rows

from vllm_specblock.candidates import select_nodes
from vllm_specblock.drafters.interface import CommittedTokens, Drafter
from vllm_specblock.tree import DraftTree

PAGE = Path(__file__).resolve().parents[2] / "docs/extending.md"


def test_the_drafter_of_the_page_drafts():
    (source,) = re.findall(r"```python\n(class Favourites.*?)```", PAGE.read_text(), re.DOTALL)
    names = {
        "torch": torch,
        "Drafter": Drafter,
        "CommittedTokens": CommittedTokens,
        "DraftTree": DraftTree,
        "select_nodes": select_nodes,
    }
    exec(source, names)
    drafter = names["Favourites"](torch.tensor([7, 3, 9]), torch.tensor([-0.5, -1.0, -2.0]))
    drafter.advance(zero_rows(8, 4))
    tree = drafter.draft()
    assert tree.token.tolist() == [[7, 3, 9]] * 2 and (tree.parent == 0).all()
    assert len(drafter.draft(torch.tensor([1])).size) == 1
