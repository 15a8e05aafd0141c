"""Bugs that other engines had with draft trees: what holds each of them here.

Each test below runs its check twice: on what is served, and with the bug put in, where the check
has to fail. What needs a running engine is held by tests that stand with the engine's:

| bug | test |
| --- | --- |
| states cut off, not gathered along the path | `test_states_are_gathered_along_the_path` |
| wrong stride of the accepted paths | `test_paths_are_read_with_their_own_stride` |
| scattered keys and values stay where they were | `test_scattered_entries_move_behind_the_root` |
| an accepted path crosses the edge of a block | `test_a_path_crosses_the_edge_of_a_block` |
| ranks of tensor parallelism draft differently | the command `benchmarks/tensor_parallel.py`, \
which takes minutes; what would make them differ is refused: \
`engine/config/test_vllm_args.py::test_adaptive_verification_over_several_processes_of_a_cpu` |
| the mask of a former, larger tree | `test_a_larger_tree_leaves_no_bits` |
| siblings at different RoPE positions | `test_siblings_share_a_position` |
| the bonus token lost | `test_the_bonus_token_behind_a_path_of_full_depth`; at max_tokens \
`engine/test_exactness.py::test_max_tokens_inside_a_path` |
| prefix cache hashes cover rejected tokens | `engine/test_prefix_hashes.py`, and for the tokens \
`engine/test_exactness.py::test_prefix_cache_hits` |
| a grammar's state of a rejected branch | `engine/test_exactness.py::test_structured_outputs` |

Of the engine's tests, two were seen to fail with a bug put in: max_tokens with bonus tokens
overwritten (in whatever step, not at the limit alone), and grammars over whole trees in place of
chains.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from vllm_specblock.triton_kernels.kv_cache.commit import KVCacheSet

from vllm_specblock.commit import accepted_paths, committed_tokens, move
from vllm_specblock.tree import ancestor_words
from vllm_specblock.verify import accept_path, tree_mask

BLOCK_SIZE = 4
PATH = torch.tensor([[0, 2, 3, 5]])  # of a root and five nodes
START, BASE = torch.tensor([0]), torch.tensor([1])
ACCEPTED = torch.tensor([3], dtype=torch.int32)


@pytest.fixture(params=["torch", "compiled"], autouse=True)
def form(request, monkeypatch):
    """The torch references, then whatever this machine takes instead."""
    if request.param == "torch":
        for module in (committed_tokens, move, tree_mask):
            monkeypatch.setattr(module, "takes", lambda tensor: False)


def holds(check: Callable[..., bool], served: Callable, bug: Callable) -> None:
    assert check(served), "the bug is there"
    assert not check(bug), "the check does not see the bug"


def test_states_are_gathered_along_the_path():
    """Cut off, the drafter would read states of nodes 1, 2, 3, where 2, 3, 5 were accepted."""
    states = torch.arange(6.0)[:, None].expand(6, 8)

    def gathered(source_of: Callable) -> bool:
        source = source_of(
            torch.zeros(4, dtype=torch.int64),
            torch.arange(4),
            torch.tensor([0, 4], dtype=torch.int32),
            START,
            BASE,
            PATH,
            ACCEPTED,
            6,
            torch.arange(20, 26),
            torch.arange(6),
            torch.tensor([0]),
            torch.zeros(1, 40, dtype=torch.int32),
            torch.zeros(1),
            *torch.zeros(2, 1, dtype=torch.int64),
        )[0]
        return states[source][:, 0].tolist() == [0, 2, 3, 5]

    def cut_off(request, local, *others):
        _, *rest = committed_tokens.committed_tokens(request, local, *others)
        return local, *rest

    holds(gathered, committed_tokens.committed_tokens, cut_off)


def test_paths_are_read_with_their_own_stride():
    """Read D apart, where they are D + 1 apart, all requests but the first get another's path."""
    paths = torch.tensor([[0, 2, 3, 5], [0, 1, 4, 6], [0, 3, 7, 8]])
    req_idx, live = torch.tensor([2, 0, 1]), torch.ones(3, dtype=torch.bool)
    row_start = torch.tensor([0, 9, 18, 27], dtype=torch.int32)
    base, accepted = torch.ones(3, dtype=torch.int64), torch.tensor([3, 2, 1], dtype=torch.int32)

    def own(read: Callable) -> bool:
        path, lengths, *_ = read(req_idx, live, row_start, base, paths, accepted)
        return path.tolist() == paths[req_idx].tolist() and lengths.tolist() == [1, 3, 2]

    def too_near(req_idx, live, row_start, base, path, accepted):
        near = path.as_strided(path.shape, (path.shape[1] - 1, 1))
        return accepted_paths.read_accepted(req_idx, live, row_start, base, near, accepted)

    holds(own, accepted_paths.read_accepted, too_near)


def brought_together(mover: Callable, slots: list[int]) -> bool:
    """Whether entries of the accepted nodes lie in the slots right behind the root's."""
    before = torch.randn(8, 2, BLOCK_SIZE, 10, generator=torch.Generator().manual_seed(0))
    cache, entries = before.clone(), [(slot // BLOCK_SIZE, slot % BLOCK_SIZE) for slot in slots]
    mover(KVCacheSet([cache]), torch.tensor(slots), START, BASE, PATH, ACCEPTED, 6)
    for place, node in enumerate(PATH[0].tolist()):
        (block, at), (old, was) = entries[place], entries[node]
        if not torch.equal(cache[block, :, at], before[old, :, was]):
            return False
    return True


def test_scattered_entries_move_behind_the_root():
    """Left in place, the next step would attend to the keys of rejected nodes."""
    within = [8, 9, 10, 11, 12, 13]
    holds(lambda mover: brought_together(mover, within), move.move_path, lambda *args: None)


def test_a_path_crosses_the_edge_of_a_block():
    """Counted on from the root's slot, entries beyond the edge land in a block of nobody's."""
    across = [22, 23, 4, 5, 6, 7]  # the last two entries of block 5, then block 1

    def counted_on(caches, slot_mapping, *others):
        onwards = slot_mapping[0] + torch.arange(len(slot_mapping))
        move.move_path(caches, onwards, *others)

    holds(lambda mover: brought_together(mover, across), move.move_path, counted_on)


def filled(mask: tree_mask.TreeMask, parent: list[int], depth: list[int]) -> None:
    """A step of one request: a root at entry 30, and its nodes."""
    rows = len(depth)
    batch = tree_mask.BatchRows(
        position=torch.arange(30, 30 + rows),
        query_start=torch.tensor([0, rows], dtype=torch.int32),
        seq_len=torch.tensor([30 + rows], dtype=torch.int32),
        req_idx=torch.tensor([0]),
        node_start=torch.tensor([0, rows], dtype=torch.int32),
        row=torch.arange(rows),
        row_req_idx=torch.zeros(rows, dtype=torch.int64),
        node=torch.arange(rows, dtype=torch.int32),
    )
    ancestors = ancestor_words(torch.tensor([parent], dtype=torch.int32))
    mask.fill(batch, torch.tensor([depth]), ancestors)


def test_a_larger_tree_leaves_no_bits():
    """Bits of a chain before would show a node its siblings, and entries that are not there."""

    def own(mask: tree_mask.TreeMask) -> bool:
        filled(mask, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5])
        filled(mask, [0, 0], [0, 1, 1])
        return mask.mask_words[:3, 0].tolist() == [0b001, 0b011, 0b101]

    class Stale(tree_mask.TreeMask):
        def fill(self, *args):
            old = self.mask_words.clone()
            super().fill(*args)
            self.mask_words |= old

    holds(lambda kind: own(kind(6, 1, 5, torch.device("cpu"))), tree_mask.TreeMask, Stale)


def test_siblings_share_a_position():
    """Positions by row would turn the second sibling's keys one too far, and its children's."""

    def by_depth(kind: type[tree_mask.TreeMask]) -> bool:
        mask = kind(6, 1, 5, torch.device("cpu"))
        filled(mask, [0, 0, 1, 2], [0, 1, 1, 2, 2])
        expected = [30, 31, 31, 32, 32]
        return mask.position[:5].tolist() == mask.node_position[:5].tolist() == expected

    class ByRow(tree_mask.TreeMask):
        def fill(self, rows, depth, ancestors):
            super().fill(rows, torch.arange(depth.shape[1])[None], ancestors)

    holds(by_depth, tree_mask.TreeMask, ByRow)


def test_the_bonus_token_behind_a_path_of_full_depth():
    """With room for D tokens alone, a path of D nodes would end without the target's own."""

    def complete(walk: Callable) -> bool:
        parent = torch.tensor([[0, 1, 2]], dtype=torch.int32)
        found = walk(
            torch.tensor([[7, 8, 9]]),
            parent,
            torch.tensor([[0, 1, 2, 3]]),
            ancestor_words(parent),
            torch.ones(1, 3, dtype=torch.bool),
            torch.tensor([[7, 8, 9, 4]]),
            3,
        )
        return found.accepted.tolist() == [3] and found.output.tolist() == [[7, 8, 9, 4]]

    def lost(*args):
        found = accept_path.accept_path(*args)
        output = found.output.clone()
        output[:, -1] = 0
        return accept_path.AcceptedPaths(found.path, found.accepted, output)

    holds(complete, accept_path.accept_path, lost)
