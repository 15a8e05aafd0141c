"""Trees that heads draft over two steps, to a file, and what was recorded of made-up requests:
`python -m support.device_branches OUT`.

Run twice: with the package as it is, and with a copy of it that takes a processor for a GPU
(`copy_for_a_gpu`), so that every branch for CUDA runs, one after the other, interpreted.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from support.scripts import load_script

ROOT = Path(__file__).resolve().parents[3]
PAGE, MAX_LEN, NODES = 8, 32, 12
STEPS = (([(0, 9), (0, 5)], 0), ([(9, 11), (5, 6)], 3))
"""Prompts of two requests, then a step of each with rejected nodes as padding."""


def copy_for_a_gpu(folder: Path) -> Path:
    """The package, changed: what lies in host memory counts as a GPU's, and loops are not there."""
    made = folder / "vllm_specblock"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "vllm_specblock", made, ignore=ignore)
    shutil.copytree(ROOT / "triton_kernels", made / "triton_kernels", ignore=ignore)
    for path in made.rglob("*.py"):
        text = path.read_text().replace(".is_cuda", ".is_cpu")
        path.write_text(text.replace("AVAILABLE = numba is not None", "AVAILABLE = False"))
    return folder


def main(out: Path) -> None:
    import torch
    from support.committed import rows_of
    from support.slab_traffic import Engine, serve, serve_late

    import vllm_specblock
    from vllm_specblock.combine.merge import merge
    from vllm_specblock.combine.route import route
    from vllm_specblock.config import NGramConfig, SpecBlockConfig
    from vllm_specblock.drafters.ngram.drafter import NGramDrafter

    blocks, levels = (
        load_script(ROOT / "tests" / "drafters/specblock/test_drafter.py"),
        load_script(ROOT / "tests" / "drafters/eagle3/test_drafter.py"),
    )
    options = SpecBlockConfig(num_blocks=2, num_starts=2, branching=[3, 4, 4, 2])
    by_path = options.model_copy(update={"num_blocks": 3})
    with torch.no_grad():
        drafters = [
            blocks.make_head(blocks.make_drafter(), options, NODES)[0],
            blocks.make_head(
                blocks.make_drafter(block_rope="path", qk_norm=True, layer_shift=False),
                by_path,
                NODES,
            )[0],
            levels.make_head(levels.make_drafter(), NODES, depth=3, top_k=3),
            NGramDrafter(NGramConfig(), NODES, MAX_LEN),
        ]
        draw = torch.Generator().manual_seed(2)
        states = torch.randn(3, 2, MAX_LEN, blocks.H, generator=draw)
        text = torch.randint(0, 7, (2, MAX_LEN + 1), generator=draw)  # which repeats itself
        tables = torch.tensor([[3, 7, 1, 12], [4, 2, 8, 11]])
        found = []
        for requests, padding in STEPS:
            rows = rows_of(requests, tables, states, text, PAGE, padding)
            trees = []
            for head in drafters:
                head.advance(rows)
                trees.append(head.draft())
            for how in ("trie", "disjoint"):
                trees.append(merge(trees[0], trees[3], how, NODES)[0].tree)
            trees.append(route(trees[0], trees[2], "sum")[0].tree)
            found += [{name: x.clone() for name, x in vars(tree).items()} for tree in trees]
    # Slabs find out by themselves what they are.
    late = bool(os.environ.get("TRITON_INTERPRET"))
    recorded = (serve_late(0, 100) if late else serve(Engine(0), 100)).seen
    torch.save({"package": vllm_specblock.__file__, "trees": found, "recorded": recorded}, out)


if __name__ == "__main__":
    import pytest
    import torch

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("TRITON_INTERPRET"):
            import triton.runtime.interpreter as interpreter

            fixes = load_script(ROOT / "benchmarks/lib/interpreter.py")
            fixes.teach_bf16_dot(interpreter, patch.setattr)
            fixes.teach_whole_arrays(interpreter, patch.setattr)
        main(Path(sys.argv[1]))
