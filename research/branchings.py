"""Trees of one SpecBlock drafter that differ in what sets their width: the rank head, nothing, or
the truth."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from vllm_specblock.config import SpecBlockConfig
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.train.eval.drafting import SpecBlockDraft, serving_shape, uniform_shape
from vllm_specblock.train.learner import Draft, EvalSequence

UNIFORM = "− rank-guided branching"
PAPER = "paper's branching"
ORACLE = "true rank buckets"
"""The ceiling of rank guidance: the bucket that the head should have said."""
_UNIFORM_WIDTHS = (3, 8, 16, 32)
_PAPERS_MAP = [2, 4, 6, 4]


def branchings(
    drafter: SpecBlockModel, nodes: int, blocks: int = SpecBlockConfig().num_blocks
) -> dict[str, Callable[[EvalSequence], Draft]]:
    """How to draft along a script, by name; what serving does by default is "".

    Args:
        nodes: N. blocks: M.
    """
    shape = serving_shape(drafter, SpecBlockConfig(num_blocks=blocks), nodes)
    papers = SpecBlockConfig(branching=_PAPERS_MAP, num_blocks=blocks)
    papers = serving_shape(drafter, papers, nodes)
    trees = {"": shape, PAPER: papers, UNIFORM: uniform_shape(shape)}
    trees |= {f"{UNIFORM}, width {n}": uniform_shape(shape, n) for n in _UNIFORM_WIDTHS}
    draft = partial(SpecBlockDraft, drafter)
    found = {name: partial(draft, shape=tree) for name, tree in trees.items()}
    for name, tree in ((ORACLE, shape), (f"{PAPER}, {ORACLE}", papers)):
        found[name] = partial(draft, shape=tree, true_buckets=True)
    return found
