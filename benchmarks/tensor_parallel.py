"""Compare tokens with and without the plugin over two ranks on a CPU, and the ranks' drafts.

    python benchmarks/tensor_parallel.py [--tokens 60] [--nodes 24]

The example pair in float32, greedy and seeded requests in one batch, through four engines of two
processes each, one after the other: plain vLLM, trees, trees that learn, and trees that are only
recorded. Both ranks must propose the same trees in every step and take every version in the same
step. Exits with 1 if a token, a draft or such a step differs.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated, Any

# Bound by itself, vLLM wants a NUMA node for every rank.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import typer
from lib import in_process  # noqa: F401 - sets the environment
from lib.pair import DRAFTER, TARGET

RANKS = 2
ROUNDS = 24
"""Most passes over all requests."""
LEARNS = {"policy": "always", "actions": "all", "every": 2, "lr": 1e-3}
PROMPTS = (
    "def main(argv):\n",
    "class Parser:\n    def __init__(self, text):\n",
    "import os\nimport sys\n\n\n",
    "for index, line in enumerate(lines):\n",
    "    raise ValueError(\n",
    "from __future__ import annotations\n",
)


class DraftRecorder:
    """Methods that vLLM adds to its workers: what a rank proposed, step by step."""

    model_runner: Any

    def record_drafts(self) -> None:
        speculator = self.model_runner.speculator
        propose, self.drafts = speculator.propose, []

        def noting(*args: Any, **kwargs: Any) -> Any:
            tokens = propose(*args, **kwargs)
            states = speculator.tree_states
            requests = args[0].idx_mapping
            swaps = self.counted("swaps")
            self.drafts.append([tokens.tolist(), states.parent[requests].tolist(), swaps])
            return tokens

        speculator.propose = noting

    def recorded_drafts(self) -> tuple[list[Any], int]:
        """Return tokens, parents and versions taken of each step, and all accepted nodes."""
        counts = self.model_runner.speculator.counters.as_dict()
        return self.drafts, counts["accepted_nodes_1"]

    def counted(self, name: str) -> int:
        """Return one of the recorder's counts on this rank; default: 0."""
        counts = self.model_runner.speculator.recorder.counts()
        return counts.get((f"adapt_{name}", 0), 0)


def engine(speculative: dict[str, Any] | None) -> Any:
    from vllm import LLM

    return LLM(
        model=str(TARGET),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=2 * len(PROMPTS),
        kv_cache_memory_bytes=128 << 20,
        tensor_parallel_size=RANKS,
        distributed_executor_backend="mp",
        worker_extension_cls=f"{DraftRecorder.__module__}.{DraftRecorder.__name__}",
        speculative_config=speculative,
    )


def answers(llm: Any, tokens: int) -> list[list[int]]:
    """Answer each prompt twice: greedy, and at T = 1 with a seed."""
    from vllm import SamplingParams

    requests = [
        SamplingParams(temperature=heat, seed=index, max_tokens=tokens, ignore_eos=True)
        for heat in (0.0, 1.0)
        for index in range(len(PROMPTS))
    ]
    found = llm.generate([*PROMPTS, *PROMPTS], requests, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in found]


def through_trees(
    wanted: list[list[int]],
    tokens: int,
    nodes: int,
    adapt: dict[str, Any] | None = None,
    until: tuple[str, int] = ("swaps", 0),
) -> None:
    """Answer with trees; exit if a token or a draft differs from `wanted`.

    until: repeat the requests until a count is reached: swaps on every rank, others on one.
    """
    began = time.monotonic()
    drafter = {"method": "specblock", "model": str(DRAFTER)}
    drafter |= {} if adapt is None else {"adapt": adapt}
    tree = engine({**drafter, "num_speculative_tokens": nodes})
    tree.collective_rpc("record_drafts")
    count, (name, least) = 0, until
    for _ in range(ROUNDS):
        got = answers(tree, tokens)
        count += sum(map(len, got))
        if got != wanted:
            sys.exit("Tokens differ from those of vLLM without the plugin.")
        counts = tree.collective_rpc("counted", args=(name,))
        reached = min(counts) if name == "swaps" else max(counts)
        if reached >= least:
            break
    swaps = tree.collective_rpc("counted", args=("swaps",))
    drafts = tree.collective_rpc("recorded_drafts")
    tree.llm_engine.engine_core.shutdown()
    (first, accepted), *others = drafts
    took, steps = time.monotonic() - began, len(first)
    print(
        f"{count} tokens over {RANKS} ranks in {steps} steps, {accepted} of them drafted, "
        f"{swaps[0]} versions taken, in {took:.0f} s",
        flush=True,
    )
    if any(other != first for other, _ in others):
        sys.exit("The ranks proposed different trees, or took versions in different steps.")
    if accepted * 5 < count:
        sys.exit("Hardly a draft was accepted: this tested little.")
    if reached < least:
        sys.exit(f"The ranks reached {counts} {name}: this tested little.")
    if name != "swaps" and any(swaps):
        sys.exit(f"The ranks took {swaps} versions, but were only to watch.")


def main(
    tokens: Annotated[int, typer.Option(help="of each of twelve answers")] = 60,
    nodes: Annotated[int, typer.Option(help="of a tree")] = 24,
) -> None:
    plain = engine(None)
    wanted = answers(plain, tokens)
    plain.llm_engine.engine_core.shutdown()
    through_trees(wanted, tokens, nodes)
    through_trees(wanted, tokens, nodes, LEARNS, ("swaps", 3))
    through_trees(wanted, tokens, nodes, {"policy": "watch"}, ("recorded_requests", 6))
    print("No token and no draft differs.")


if __name__ == "__main__":
    typer.run(main)
