"""A picture of one real merged tree: which head drafted each node, and what the target accepted.

    python benchmarks/merged_tree_picture.py --out docs/merged_tree.svg [--help]

Runs two heads over a prompt in vLLM with `merge="trie"`, and draws the most mixed of the trees
that were verified: one of which both heads have nodes to themselves, some are shared, and the
accepted path holds nodes of several kinds. Drawing needs matplotlib.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import typer
from combinations import together
from one_engine import TARGET

ROOT = Path(__file__).resolve().parent.parent
HEADS = ROOT / "examples/two_heads"
COLOURS = {0: "#d9d9d9", 1: "#8ecae6", 2: "#ffb703", 3: "#95d5b2"}
"""Of the root, of head 1, of head 2, of both."""
LEGEND = {1: "head 1", 2: "head 2", 3: "both heads"}
ACCEPTED = "#c1121f"


@dataclass(frozen=True)
class Picture:
    """One tree as plain data; entry 0 of each list is the root.

    Attributes:
        text: each node's token, as text.
        parent: each node's parent, −1 for the root.
        origin: 0 for the root, else 1: head 1's, 2: head 2's, 3: both heads'.
        accepted: nodes of the accepted path, from the root on.
    """

    text: list[str]
    parent: list[int]
    origin: list[int]
    accepted: list[int]


def layout(parent: list[int]) -> list[tuple[float, float]]:
    """(depth, height) of every node: leaves one below the other, a parent amid its children.

    Args:
        parent: each node's, −1 for the root; parents first.
    """
    children: list[list[int]] = [[] for _ in parent]
    depth = [0] * len(parent)
    for node, up in enumerate(parent):
        if up >= 0:
            children[up].append(node)
            depth[node] = depth[up] + 1
    height, leaves, stack = [0.0] * len(parent), 0, [(0, False)]
    while stack:
        node, seen = stack.pop()
        below = children[node]
        if below and not seen:
            stack += [(node, True), *((child, False) for child in reversed(below))]
        elif below:
            height[node] = (height[below[0]] + height[below[-1]]) / 2
        else:
            height[node], leaves = -leaves, leaves + 1
    return list(zip(map(float, depth), height))


def mix(picture: Picture) -> int:
    """How much there is to see: kinds of node on the accepted path, its length, then all kinds
    of node in the tree."""
    kinds = {picture.origin[node] for node in picture.accepted[1:]}
    return 100 * len(kinds) + 10 * min(9, len(picture.accepted)) + len(set(picture.origin))


def draw(picture: Picture, path: Path) -> None:
    """Save the tree, root on the left; the suffix of `path` says in which format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    places = layout(picture.parent)
    deepest = max(x for x, _ in places)
    leaves = 1 - min(y for _, y in places)
    figure, axes = plt.subplots(figsize=(2 + 1.25 * deepest, 1 + 0.26 * leaves))
    on_path = set(picture.accepted)
    for node, up in enumerate(picture.parent):
        (x, y), taken = places[node], node in on_path
        if up >= 0:
            axes.plot(
                [places[up][0], x],
                [places[up][1], y],
                color=ACCEPTED if taken else "#adb5bd",
                linewidth=2.2 if taken else 0.8,
                zorder=1,
            )
        axes.text(
            *(x, y, picture.text[node]),
            fontsize=7,
            family="monospace",
            ha="center",
            va="center",
            parse_math=False,
            fontweight="bold" if taken else "normal",
            bbox={
                "boxstyle": "round,pad=0.25",
                "facecolor": COLOURS[picture.origin[node]],
                "edgecolor": ACCEPTED if taken else "#6c757d",
                "linewidth": 1.8 if taken else 0.5,
            },
            zorder=2,
        )
    keys = [Patch(facecolor=COLOURS[kind], label=name) for kind, name in LEGEND.items()]
    keys.append(Patch(facecolor="white", edgecolor=ACCEPTED, linewidth=1.8, label="accepted"))
    axes.legend(handles=keys, loc="upper center", ncols=4, fontsize=8, frameon=False,
                bbox_to_anchor=(0.5, 1.0 + 0.6 / (1 + 0.26 * leaves)))  # fmt: skip
    axes.set_xlim(-0.5, deepest + 0.5)
    axes.set_ylim(-leaves + 0.3, 0.7)
    axes.axis("off")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def picture_of(combined: Any, root: int, ahead: list[int], tokenizer: Any) -> Picture:
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
    accepted = [0]
    for wanted in ahead:
        nexts = [n for n in range(1, size + 1) if parent[n] == accepted[-1] and token[n] == wanted]
        if not nexts:
            break
        accepted.append(nexts[0])
    text = [tokenizer.decode([each]).replace("\n", "⏎").replace(" ", "·") or "∅" for each in token]
    return Picture(text, parent, origin, accepted)


def record(
    speculative: dict[str, Any], target: Path, prompt: str, new_tokens: int
) -> list[Picture]:
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
    proposer = core.model_executor.driver_worker.worker.model_runner.speculator.proposer
    seen: list[tuple[Any, int]] = []
    combine = proposer.combine

    def noting(rows: Any) -> Any:
        proposal = combine(rows)
        seen.append((proposal.combined, int(rows.position[rows.last[0]]) + 1))
        return proposal

    proposer.combine = noting
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
    draw(best, out)
    print(f"{out}: tree {pictures.index(best) + 1} of {len(pictures)}, {len(best.text) - 1} nodes, "
          f"{len(best.accepted) - 1} accepted")  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
