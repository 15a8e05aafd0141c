"""What torch needs of the emulated GPU."""

import pytest
import torch


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.cat([x, torch.ones(3)]),
        lambda x: torch.ones(3)[x.long()],
        lambda x: x.gather(0, torch.tensor([1])),
    ],
)
def test_devices_do_not_mix(function):
    with pytest.raises(RuntimeError):
        function(torch.ones(3, device="cuda"))


def test_a_graph_keeps_addresses_and_numbers():
    x, out = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    graph, factor = torch.cuda.CUDAGraph(), 3.0
    with torch.cuda.graph(graph):
        middle = x * factor
        out.copy_(middle + 1)
    assert out.cpu().tolist() == [0.0] * 4  # a capture runs nothing
    factor = 5.0
    x.fill_(2.0)
    graph.replay()
    x = torch.full((4,), 9.0, device="cuda")
    assert out.cpu().tolist() == [7.0] * 4
    graph.replay()
    assert out.cpu().tolist() == [7.0] * 4


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.cpu(),
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.tensor([1.0], device="cuda"),
        lambda x: x.nonzero(),
    ],
)
def test_a_capture_refuses_to_wait(call):
    x = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match="captur"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1)
        call(x)
    torch.cuda.synchronize()
    assert x.cpu().tolist() == [1.0] * 4


def test_forks_have_to_join():
    x, side, graph = torch.ones(4, device="cuda"), torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def fork():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)

    with torch.cuda.graph(graph):
        fork()
        torch.cuda.current_stream().wait_stream(side)
    graph.replay()
    assert x.cpu().tolist() == [2.0] * 4
    with pytest.raises(RuntimeError, match="unjoined"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        fork()
