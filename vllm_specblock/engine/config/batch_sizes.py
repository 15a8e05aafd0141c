"""Default batch sizes for trees: tokens of a step, sizes of CUDA graphs.

vLLM's defaults are for a token or a short chain per request; a tree takes N + 1 tokens.
"""

from __future__ import annotations

from vllm.config import ParallelConfig
from vllm.engine.arg_utils import EngineArgs

_REQUESTS = 256
"""Largest batch to size for: larger steps are compute-bound and verify few nodes."""

_GRAPH_REQUESTS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)
"""Requests of the decode steps that are captured beside vLLM's own sizes, up to 512 tokens."""


def make_room(args: EngineArgs, num_speculative_tokens: int, parallel: ParallelConfig) -> None:
    """Raise an unset `max_num_batched_tokens` to the tokens of the requests' trees."""
    if args.max_num_batched_tokens is not None or args.enable_chunked_prefill is False:
        return
    tokens, requests = args.get_batch_defaults(parallel.world_size)
    count = min(args.max_num_seqs or max(requests.values()), _REQUESTS)
    wanted = count * (num_speculative_tokens + 1)
    # The default (server or offline) is not known here.
    if wanted > min(tokens.values()):
        args.max_num_batched_tokens = max(wanted, *tokens.values())


def capture_trees(args: EngineArgs, num_speculative_tokens: int) -> None:
    """Add decode steps of whole trees to the sizes that vLLM captures, unless any are set."""
    compilation = args.compilation_config
    given = (
        args.cudagraph_capture_sizes,
        args.max_cudagraph_capture_size,
        compilation.cudagraph_capture_sizes,
        compilation.max_cudagraph_capture_size,
    )
    scheduled = args.speculative_config.get("num_speculative_tokens_per_batch_size")
    if any(size is not None for size in given) or scheduled or args.enforce_eager:
        return
    grid = {1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)}
    most = args.max_num_seqs or _GRAPH_REQUESTS[-1]
    trees = {count * (num_speculative_tokens + 1) for count in _GRAPH_REQUESTS if count <= most}
    longest = max(512, min(most, _GRAPH_REQUESTS[-1]) * (num_speculative_tokens + 1))
    args.cudagraph_capture_sizes = sorted(size for size in grid | trees if size <= longest)
