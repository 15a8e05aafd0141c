"""The drafter that docs/extending.md shows is complete."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from support.committed import zero_rows

from vllm_specblock.candidates import select_nodes
from vllm_specblock.config import parse_drafter
from vllm_specblock.drafters.interface import CommittedTokens, Drafter
from vllm_specblock.drafters.registry import DRAFTERS, DrafterOptions, register_drafter
from vllm_specblock.tree import DraftTree

PAGE = Path(__file__).resolve().parents[2] / "docs/extending.md"


def test_the_drafter_of_the_page_drafts():
    options, drafter = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {
        "__name__": __name__,
        "torch": torch,
        "Drafter": Drafter,
        "DrafterOptions": DrafterOptions,
        "register_drafter": register_drafter,
        "CommittedTokens": CommittedTokens,
        "DraftTree": DraftTree,
        "select_nodes": select_nodes,
    }
    try:
        exec(options + drafter, names)
        given = parse_drafter({"tokens": [7, 3, 9]}, "favourites")
    finally:
        DRAFTERS.pop("favourites", None)
    made = names["Favourites"](given, 3, 64)
    made.advance(zero_rows(8, 4))
    tree = made.draft()
    assert tree.token.tolist() == [[7, 3, 9]] * 2 and (tree.parent == 0).all()
