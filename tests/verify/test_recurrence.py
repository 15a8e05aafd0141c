"""Trees through recurrent layers: every node as if its own path had been the whole text."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import conv1d, normalize

from vllm_specblock.verify.recurrence import Paths, Recurrence, advance, convolve, newest, scan

HEADS, GROUPS, KEY, VALUE, CHANNELS, WIDTH = 6, 2, 8, 5, 4, 4


def drawn(requests: int, rows: int, delta: bool) -> Recurrence:
    """Decays are those of trained gates, 0.8 to 1."""

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(requests, rows, *size).double()

    query, key = (normalize(draw(GROUPS, KEY), dim=-1) for _ in range(2))
    beta = draw(HEADS).sigmoid() if delta else None
    return Recurrence(query, key, draw(HEADS, VALUE), -0.2 * draw(HEADS).sigmoid(), beta)


@pytest.fixture(params=[(1, 1), (2, 12), (3, 60)], ids=str)
def tree(request):
    """Paths of R requests with 1 … 3 committed rows and N nodes, of any earlier node each."""
    requests, nodes = request.param
    torch.manual_seed(nodes)
    base = torch.randint(1, 4, (requests,))
    parent = (torch.rand(requests, nodes) * (torch.arange(nodes) + 1)).int()
    return Paths(base, parent, int(base.max()) + nodes), base, parent


def path_to(base: int, parent: torch.Tensor, node: int) -> list[int]:
    """Rows of the path to a node, 0: the root; `parent` [N]."""
    path = []
    while node > 0:
        path.insert(0, base - 1 + node)
        node = int(parent[node - 1])
    return list(range(base)) + path


def recomputed(
    rows: Recurrence, request: int, path: list[int], state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[H, V] and [H, K, V] after the last of a path's rows, row by row from the definition."""
    now, out = state.clone(), torch.zeros(HEADS, VALUE).double()
    for row in path:
        query, key, value, log_decay = (x[request, row] for x in rows[:4])
        for head in range(HEADS):
            group = head * GROUPS // HEADS
            now[head] *= log_decay[head].exp()
            written = value[head]
            if rows.beta is not None:
                written = rows.beta[request, row, head] * (written - key[group] @ now[head])
            now[head] += torch.outer(key[group], written)
            out[head] = query[group] @ now[head]
    return out, now


@pytest.mark.parametrize(
    ("delta", "decays"),
    [(True, 1), (False, 1), (True, 5000)],
    ids=["delta rule", "Mamba-2", "decays that vanish"],
)
def test_outputs_and_states_are_those_of_each_path_alone(tree, delta, decays):
    paths, base, parent = tree
    rows = drawn(*paths.parent.shape, delta)
    rows = rows._replace(log_decay=decays * rows.log_decay)
    state = torch.randn(len(base), HEADS, KEY, VALUE).double()
    out, written = scan(rows, paths, state)
    for node in range(parent.shape[1] + 1):
        last = base - 1 + node
        after = advance(written, paths, last, state)
        for request in range(len(base)):
            path = path_to(int(base[request]), parent[request], node)
            expected, kept = recomputed(rows, request, path, state[request])
            torch.testing.assert_close(out[request, path[-1]], expected)
            torch.testing.assert_close(after[request], kept)


@pytest.mark.parametrize("biased", [False, True])
def test_the_convolution_and_its_history_follow_each_path(tree, biased):
    paths, base, parent = tree
    x = torch.randn(*paths.parent.shape, CHANNELS).double()
    history = torch.randn(len(base), WIDTH - 1, CHANNELS).double()
    weight, bias = torch.randn(CHANNELS, WIDTH).double(), torch.randn(CHANNELS).double()
    out = convolve(history, x, paths, weight, bias if biased else None)
    for node in range(parent.shape[1] + 1):
        after = newest(history, x, paths, base - 1 + node)
        for request in range(len(base)):
            path = path_to(int(base[request]), parent[request], node)
            text = torch.cat([history[request], x[request, path]])
            expected = conv1d(text[None].mT, weight[:, None], groups=CHANNELS)[0, :, -1]
            expected = expected + bias if biased else expected
            torch.testing.assert_close(out[request, path[-1]], expected)
            torch.testing.assert_close(after[request], text[1 - WIDTH :])
