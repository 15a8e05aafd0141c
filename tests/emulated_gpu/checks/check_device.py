"""What torch needs of the emulated GPU."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa


def test_it_is_an_h100():
    assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    free, total = torch.cuda.mem_get_info()
    assert total == 80 << 30 and free > 70 << 30


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x @ x.T,
        lambda x: x[x > 0],
        lambda x: torch.cat([x, x[:, :3]], 1),
        lambda x: x.t()[3:].cumsum(0).to(torch.int32),
        lambda x: x.clone().view(-1)[::3].mul_(2),
        lambda x: torch.add(x, 1, out=torch.empty(0, device=x.device)),
        lambda x: x.sum().item() * torch.ones(1),
        lambda x: x + torch.tensor(2.0),
        lambda x: sdpa(x.view(1, 3, 11, 17), *[x[None, None, :11]] * 2, enable_gqa=True),
    ],
)
def test_operators(function):
    x = torch.randn(33, 17, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(function(x.cuda()).cpu(), function(x))


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


def test_flash_attention_runs_in_stream_order():
    """At the call, its lengths may still be those of the step before."""
    flash = pytest.importorskip("vllm.vllm_flash_attn").flash_attn_varlen_func
    q, before = torch.randn(5, 2, 64).bfloat16().cuda(), torch.tensor([0, 50, 100]).int()
    starts, graph = before.cuda(), torch.cuda.CUDAGraph()
    wanted = torch.cat([causal(q[:3].cpu()), causal(q[3:].cpu())])
    now = torch.tensor([0, 3, 5]).int().cuda()

    def attend():
        starts.copy_(now)
        lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        return flash(q, q, q, **lengths, max_seqlen_q=3, max_seqlen_k=3, causal=True, fa_version=3)

    torch.testing.assert_close(attend().cpu(), wanted)
    starts.copy_(before)
    with torch.cuda.graph(graph):
        captured = attend()
    graph.replay()
    torch.testing.assert_close(captured.cpu(), wanted)


def causal(x: torch.Tensor) -> torch.Tensor:
    heads = x.float().transpose(0, 1)
    return sdpa(heads, heads, heads, is_causal=True).transpose(0, 1).bfloat16()
