"""What the rows of a mixed batch see, by hand."""

from __future__ import annotations

import torch

from vllm_specblock.tree import climb
from vllm_specblock.verify.tree_mask import BatchRows, TreeMask

PARENT = [[0, 0, 1], [0, 1, 2]]  # slot 0: two children, and one's child; slot 1: a chain
DEPTH = [[0, 1, 1, 2], [0, 1, 2, 3]]


def test_a_prompt_is_causal_and_a_tree_sees_its_paths():
    """A chunk of a prompt in slot 1, two nodes of a tree in slot 0, two padding rows."""
    rows = BatchRows(
        position=torch.tensor([4, 5, 6, 30, 31, 32, 7, 8]),
        query_start=torch.tensor([0, 3, 6], dtype=torch.int32),
        seq_len=torch.tensor([7, 33], dtype=torch.int32),
        req_idx=torch.tensor([1, 0]),
        node_start=torch.tensor([0, 1, 4], dtype=torch.int32),
        row=torch.tensor([2, 3, 4, 5]),
        row_req_idx=torch.tensor([1, 0, 0, 0]),
        node=torch.tensor([0, 0, 1, 2], dtype=torch.int32),
    )
    tree_mask = TreeMask(10, 3, 3, torch.device("cpu"))
    tree_mask.mask_words[:8] = -1  # of a former, larger batch
    ancestors, _ = climb(torch.tensor(PARENT, dtype=torch.int32))
    tree_mask.fill(rows, torch.tensor(DEPTH), ancestors)
    # The last row of a prompt is a root: it sees itself in the window.
    assert tree_mask.prefix_len.tolist() == [5, 6, 6, 30, 30, 30, 8, 9, 0, 0]
    assert tree_mask.mask_words[:, 0].tolist() == [0, 0, 1, 1, 0b011, 0b101, 0, 0, 0, 0]
    assert tree_mask.tree_start.tolist() == [6, 30, 0]
    assert tree_mask.position.tolist() == [4, 5, 6, 30, 31, 31, 7, 8, 0, 0]
    assert tree_mask.node_position.tolist()[:4] == [6, 30, 31, 31]
