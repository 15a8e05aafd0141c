"""A picture of one real merged tree: which head drafted each node, and what the target accepted.

    python benchmarks/merged_tree_picture.py --out docs/merged_tree.svg [--help]

Runs two heads over a prompt in vLLM with `merge="trie"`, and draws the most mixed of the trees
that were verified: one of which both heads have nodes to themselves, some are shared, and the
accepted path holds nodes of several kinds. Drawing needs matplotlib.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import typer
from engine_process import TARGET
from lib.spec_configs import together

from vllm_specblock.bench.figures.style import shown
from vllm_specblock.bench.figures.tree_picture import Legend, TreePicture, save_tree
from vllm_specblock.train.eval.replay import accepted_path

ROOT = Path(__file__).resolve().parent.parent
HEADS = ROOT / "examples/two_heads"
COLOURS = {0: "#d9d9d9", 1: "#8ecae6", 2: "#ffb703", 3: "#95d5b2"}
"""Of the root, of head 1, of head 2, of both."""
LEGEND = Legend({1: "head 1", 2: "head 2", 3: "both heads"}, COLOURS)


def mix(picture: TreePicture) -> int:
    """How much there is to see: kinds of node on the accepted path, its length, then all kinds
    of node in the tree."""
    kinds = {picture.kind[node] for node in picture.accepted[1:]}
    return 100 * len(kinds) + 10 * min(9, len(picture.accepted)) + len(set(picture.kind))


def picture_of(combined: Any, root: int, ahead: list[int], tokenizer: Any) -> TreePicture:
    """The first request's tree, and how far the text that followed walks down it.

    Args:
        combined: `Combined` of at least one request.
        root: its root's token id.
        ahead: token ids that came after the root.
        tokenizer: the target's.
    """
    size = int(combined.tree.size[0])
    token = [root, *combined.tree.token[0, :size].tolist()]
    parent = [-1, *combined.tree.parent[0, :size].tolist()]
    origin = [0, *combined.origin[0, :size].tolist()]
    accepted = accepted_path(combined.tree, ahead)
    return TreePicture([shown(tokenizer, each) for each in token], parent, origin, accepted)


def record(
    speculative: dict[str, Any], target: Path, prompt: str, new_tokens: int
) -> list[TreePicture]:
    """Every tree that was verified while the prompt was gone on with, greedily."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(target),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=1,
        kv_cache_memory_bytes=128 << 20,
        distributed_executor_backend="uni",
        speculative_config=speculative,
    )
    core = llm.llm_engine.engine_core.engine_core
    draft_policy = core.model_executor.driver_worker.worker.model_runner.speculator.draft_policy
    seen: list[tuple[Any, int]] = []
    combine = draft_policy.combine

    def noting(rows: Any) -> Any:
        proposal = combine(rows)
        seen.append((proposal.combined, int(rows.position[rows.last[0]]) + 1))
        return proposal

    draft_policy.combine = noting
    (answer,) = llm.generate(
        [prompt],
        SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True),
        use_tqdm=False,
    )
    text = [*answer.prompt_token_ids, *answer.outputs[0].token_ids]
    # The warm-up's trees are rooted nowhere in this text, the last may not have been verified.
    return [
        picture_of(combined, text[at], text[at + 1 :], llm.get_tokenizer())
        for combined, at in seen
        if len(answer.prompt_token_ids) <= at < len(text) - 1
    ]


def main(
    out: Annotated[Path, typer.Option(help="An .svg or .png.")] = ROOT / "docs/merged_tree.svg",
    target: Annotated[Path, typer.Option(help="Folder of the target.")] = TARGET,
    first: Annotated[Path, typer.Option(help="Head 1.")] = HEADS / "code",
    second: Annotated[Path, typer.Option(help="Head 2.")] = HEADS / "tables",
    nodes: Annotated[int, typer.Option(help="Nodes of the tree.")] = 24,
    new_tokens: Annotated[int, typer.Option(help="Tokens to go on with.")] = 96,
    prompt: Annotated[str, typer.Option(help="What to go on with.")] = "def main(argv):\n",
) -> None:
    """Run, pick a tree, draw it."""
    heads = {"model": str(first)}, {"model": str(second)}
    speculative = together(*heads, nodes, "merge trie, joint")
    pictures = record(speculative, target, prompt, new_tokens)
    best = max(pictures, key=mix)
    save_tree(best, LEGEND, out)
    print(
        f"{out}: tree {pictures.index(best) + 1} of {len(pictures)}, {len(best.text) - 1} nodes, "
        f"{len(best.accepted) - 1} accepted"
    )


if __name__ == "__main__":
    typer.run(main)
