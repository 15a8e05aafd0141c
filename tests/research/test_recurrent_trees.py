"""Trees through recurrent layers: every node as if its own path had been all there is."""

from __future__ import annotations

import pytest
import torch
from recurrent_trees import (
    Rows,
    ancestors,
    by_mask,
    by_parents,
    commit,
    made_up,
    measure,
    random_tree,
    tree_convolution,
)
from torch.nn.functional import conv1d, softplus

HEADS, KEY, VALUE = 3, 8, 5


@pytest.fixture(params=[(1, 2), (2, 13), (3, 60)], ids=str)
def tree(request):
    """Rows in float64, parents, and a state that came before."""
    requests, nodes = request.param
    torch.manual_seed(nodes)
    rows = Rows(*(x.double() for x in made_up(nodes, HEADS, KEY, VALUE, requests)))
    return rows, random_tree(nodes, requests), torch.randn(requests, HEADS, KEY, VALUE).double()


def path_to(parent: torch.Tensor, node: int) -> list[int]:
    """Nodes from the root on; `parent` [N]."""
    path = [node]
    while (above := int(parent[path[0]])) >= 0:
        path.insert(0, above)
    return path


def along(rows: Rows, request: int, path: list[int]) -> Rows:
    return Rows(*(x[request : request + 1, path] for x in rows))


def recomputed(rows: Rows, state: torch.Tensor, delta: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """[H, V] and [H, K, V] after the last of a path's rows, token by token from the definition."""
    now, out = state.clone(), torch.zeros(HEADS, VALUE).double()
    for query, key, value, beta, log_decay in zip(*(x[0] for x in rows)):
        for head in range(HEADS):
            now[head] *= log_decay[head].exp()
            written = value[head]
            if delta:
                written = beta[head] * (written - key[head] @ now[head])
            now[head] += torch.outer(key[head], written)
            out[head] = query[head] @ now[head]
    return out, now


@pytest.mark.parametrize("delta", [True, False], ids=["delta rule", "Mamba-2"])
def test_both_ways_are_every_path_recomputed(tree, delta):
    rows, parent, state = tree
    seen = ancestors(parent)
    gathered, states = by_parents(rows, parent, state, delta)
    masked, written = by_mask(rows, seen, state, delta)
    for request in range(len(parent)):
        for node in range(parent.shape[1]):
            path = path_to(parent[request], node)
            out, after = recomputed(along(rows, request, path), state[request], delta)
            torch.testing.assert_close(gathered[request, node], out)
            torch.testing.assert_close(states[request, node], after)
            torch.testing.assert_close(masked[request, node], out)
            last = torch.full((len(parent),), node)
            committed = commit(rows, written, seen, last, state)
            torch.testing.assert_close(committed[request], after)


def test_the_next_tree_goes_on_from_the_accepted_path(tree):
    rows, parent, state = tree
    seen, last = ancestors(parent), parent.argmax(1)
    kept = commit(rows, by_mask(rows, seen, state)[1], seen, last, state)
    again, _ = by_mask(rows, seen, kept)
    for request, node in enumerate(last.tolist()):
        path = path_to(parent[request], node)
        twice = along(rows, request, path + path)
        torch.testing.assert_close(again[request, node], recomputed(twice, state[request], True)[0])


def test_a_node_changes_what_stands_below_it_and_nothing_else(tree):
    rows, parent, state = tree
    seen, node = ancestors(parent), parent.shape[1] // 2
    value = rows.value.clone()
    value[:, node] += 1
    before, after = (by_mask(x, seen, state)[0] for x in (rows, rows._replace(value=value)))
    differs = (before - after).abs().amax((2, 3)) > 1e-12
    assert differs.equal(seen[:, :, node])


def test_states_that_fade_away_stay_numbers(tree):
    rows, parent, state = tree
    faded = rows._replace(log_decay=rows.log_decay * 5000)
    out, _ = by_mask(faded, ancestors(parent), state)
    torch.testing.assert_close(out, by_parents(faded, parent, state)[0])


def test_the_convolution_follows_each_path(tree):
    _, parent, _ = tree
    requests, nodes = parent.shape
    x, history, weight = (
        torch.randn(*size).double() for size in ((requests, nodes, 4), (requests, 3, 4), (4, 4))
    )
    out = tree_convolution(x, parent, history, weight)
    for request in range(requests):
        for node in range(nodes):
            path = x[request, path_to(parent[request], node)]
            text = torch.cat([history[request], path])[None].mT
            expected = conv1d(text, weight[:, None], groups=4)[0, :, -1]
            torch.testing.assert_close(out[request, node], expected)


def test_vllms_own_kernel_says_the_same_of_each_path_and_cannot_say_it_of_a_tree():
    """Its kernel for CPUs, in the dtypes that it takes; a chain is all that it knows."""
    pytest.importorskip("vllm")
    from vllm import _custom_ops as ops

    torch.manual_seed(1)
    nodes, heads, size = 9, 2, 64
    parent = random_tree(nodes)
    query, key, value = (torch.randn(1, nodes, heads, size).bfloat16() for _ in range(3))
    gate, beta = (torch.randn(1, nodes, heads).bfloat16() for _ in range(2))
    log_rate, bias = torch.randn(heads), torch.randn(heads).bfloat16()
    state = torch.randn(1, heads, size, size)
    unit = torch.nn.functional.normalize
    rows = Rows(
        unit(query.float(), dim=-1) * size**-0.5,
        unit(key.float(), dim=-1),
        value.float(),
        beta.float().sigmoid(),
        -log_rate.exp() * softplus(gate + bias),
    )
    masked, _ = by_mask(rows, ancestors(parent), state)

    def of_vllm(path: list[int]) -> torch.Tensor:
        count = len(path)
        states = torch.zeros(count + 1, heads, size, size)
        states[1] = state[0]
        return ops.fused_sigmoid_gating_delta_rule_update_spec_cpu(
            A_log=log_rate,
            dt_bias=bias,
            q=query[0, path],
            k=key[0, path],
            v=value[0, path],
            a=gate[0, path],
            b=beta[0, path],
            initial_state_source=states,
            spec_state_indices=torch.arange(1, count + 1, dtype=torch.int32)[None],
            num_accepted_tokens=torch.ones(1, dtype=torch.int32),
            cu_seqlens=torch.tensor([0, count], dtype=torch.int32),
            use_qk_l2norm_in_kernel=True,
        ).float()

    for node in range(nodes):
        path = path_to(parent[0], node)
        torch.testing.assert_close(of_vllm(path)[-1], masked[0, node], rtol=2**-7, atol=1e-3)
    as_a_chain = of_vllm(list(range(nodes)))
    branch = next(node for node in range(1, nodes) if parent[0, node] != node - 1)
    assert (as_a_chain[branch] - masked[0, branch]).abs().max() > 1e-2


def test_what_is_kept_is_counted_of_the_published_sizes():
    found = measure(nodes=2, runs=1)
    # 2 MiB a state, 36 layers, three rows.
    assert found["states_mib"] == 3 * 36 * 2
    assert found["rows_mib"] == pytest.approx(3 * 36 * 4 * (32 * 129 + 16 * 128) / 2**20)
    assert found["largest_error"] < 1e-5
