"""CPU forms of our own ops."""

from __future__ import annotations

from functools import partial

from vllm_specblock.candidates import select, tree_and_nodes
from vllm_specblock.combine import merge, merge_by
from vllm_specblock.feedback.acceptance_estimator import learn_scores
from vllm_specblock.triton_kernels.feedback.write_survival_numba import learn_scores_numba
from vllm_specblock.triton_kernels.layers.lm_and_rank_head import lm_and_rank_head
from vllm_specblock.triton_kernels.layers.lm_and_rank_head_numba import lm_and_rank_head_numba
from vllm_specblock.triton_kernels.tree.merge_trees_numba import merge_trees_numba
from vllm_specblock.triton_kernels.tree.select_tree_numba import select_numba
from vllm_specblock.triton_kernels.verify.accept_path_numba import accept_path_numba
from vllm_specblock.verify.accept_path import accept_path_rows


def register() -> None:
    """Give every op its CPU form."""
    accept_path_rows.loop = accept_path_numba
    learn_scores.loop = learn_scores_numba
    lm_and_rank_head.loop = lm_and_rank_head_numba
    merge.loop = partial(merge_by, merge_trees_numba)
    select.loop = lambda *given: tree_and_nodes(select_numba(*given))
