"""Compare tokens with and without the plugin, for every combination of heads: none may change.

    python benchmarks/exactness.py [--combination "SpecBlock + n-gram, route"] [--tokens 20000]

Batches of eight requests of different length and temperature, on held-out prompts of the example
pair, through two engines in one process, in float32; each combination in a process of its own.
Exits with 1 if a token differs. `examples/two_heads/README.md` makes the second SpecBlock drafter
and the EAGLE-3 one. Another target answers chat questions:

    python benchmarks/exactness.py --target TARGET --questions FOLDER --drafter DRAFTER \
      --combination "SpecBlock + n-gram, merge trie, joint"

With --swaps the SpecBlock drafters get other weights twice in every step (`lib/weight_swaps.py`),
every batch comes a second time from the prefix cache, and prompts come in chunks:

    python benchmarks/exactness.py --swaps --tokens 2200

With --ranks 2 both engines are tensor parallel, and all ranks have to draft the same; trees are
also compared while a trainer learns, and while it only records:

    python benchmarks/exactness.py --ranks 2 --tokens 2000
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

# In one process, a second thread of torch only spins beside vLLM's own.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# On a GPU vLLM attends in float32 by a Triton kernel, which rounds products to TF32 unless told.
os.environ["TRITON_F32_DEFAULT"] = "ieee"

import torch
import typer
from lib import pair, ranks
from lib.in_process import runner_of
from lib.options import known
from lib.results_store import ROOT
from lib.spec_configs import NGRAM, POLICIES, alone, eagle3, specblock, together
from lib.weight_swaps import Swaps, make_versions
from tqdm import tqdm

from vllm_specblock.bench.questions import read_questions

TEMPERATURES = (0.0, 0.7, 1.0, 0.0)
_LONGEST = 1024
_MOST_NEW = 100 + 40 * 7
MOST_BATCHES = 24
"""Until a trainer has to have done enough, after all tokens are compared."""
CHUNK = 256
"""Tokens of a step while weights are swapped: prompts of a batch have several times as many."""
FULL_GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}


def combinations(drafter: str, second: str, eagle: str, nodes: int) -> dict[str, dict[str, Any]]:
    """Return every `speculative_config` by its name.

    drafter, second, eagle: folders of two SpecBlock drafters and an EAGLE-3 one.
    """
    kinds = {"SpecBlock": specblock(drafter), "EAGLE-3": eagle3(eagle), "n-gram": NGRAM}
    found = {name: alone(head, nodes) for name, head in kinds.items()}
    pairs = {
        "SpecBlock + SpecBlock": (specblock(drafter), specblock(second)),
        "SpecBlock + EAGLE-3": (kinds["SpecBlock"], kinds["EAGLE-3"]),
        "SpecBlock + n-gram": (kinds["SpecBlock"], NGRAM),
        "EAGLE-3 + n-gram": (kinds["EAGLE-3"], NGRAM),
    }
    for name, (first, other) in pairs.items():
        for policy in POLICIES:
            found[f"{name}, {policy}"] = together(first, other, nodes, policy)
    budgets = {
        f"{name}, adaptive": keys | {"enable_adaptive_verification": True}
        for name, keys in found.items()
        if name in kinds or name.endswith(", merge trie, joint")
    }
    return found | budgets


def of_ranks(tree: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the combinations of several ranks, from that of a SpecBlock drafter alone."""
    # By default a budget adapts where ranks can agree on it.
    tree = {key: x for key, x in tree.items() if key != "enable_adaptive_verification"}
    learning = {f"SpecBlock, {how}": tree | {"adapt": keys} for how, keys in ranks.ADAPT.items()}
    return {"SpecBlock": tree} | learning


def compare(
    speculative: dict[str, Any],
    tokens: int,
    graphs: bool,
    target: Path,
    questions: Path | None,
    other: Path | None = None,
    num_ranks: int = 1,
) -> tuple[int, float, Swaps | None]:
    """Generate the same requests with and without drafts, until `tokens` are compared.

    Args:
        questions: folder of sets of chat questions; None: the example pair's own text.
        graphs: decode from CUDA graphs. vLLM's compiler stays off: it would change sums.
        other: a drafter of the same shape, whose weights are swapped in; None: no swaps.
        num_ranks: tensor-parallel ranks of each engine.
    """
    from vllm import LLM, SamplingParams

    def engine(speculative: dict | None) -> LLM:
        return LLM(
            model=str(target),
            dtype="float32",
            **(FULL_GRAPHS if graphs else {"enforce_eager": True}),
            max_model_len=_LONGEST,
            max_num_seqs=8,
            **({"max_num_batched_tokens": CHUNK} if other else {}),
            kv_cache_memory_bytes=(256 if questions is None else 1024) << 20,
            gpu_memory_utilization=0.3,  # vLLM wants so much free, and several engines share a GPU
            speculative_config=speculative,
            **ranks.arguments(num_ranks),
        )

    plain, tree = engine(None), engine(speculative)
    if questions is None:
        texts = [text for size in (400, 150, 800) for text in pair.beginnings(40, size)]
    else:
        texts = chat_texts(questions, plain.get_tokenizer())
    swaps = start_swaps(tree, speculative, other) if other else None
    policy = speculative.get("adapt", {}).get("policy")
    if num_ranks > 1:
        tree.collective_rpc("record_drafts")
    compared, batch, began = 0, 0, time.monotonic()
    with tqdm(total=tokens, unit="token") as bar:
        while compared < tokens or (batch < MOST_BATCHES and ranks.lacking(tree, policy)):
            prompts = [texts[(8 * batch + i) % len(texts)] for i in range(8)]
            params = [
                SamplingParams(
                    temperature=TEMPERATURES[i % 4],
                    top_p=0.9 if i % 3 == 0 else 1.0,
                    seed=8 * batch + i,
                    max_tokens=100 + 40 * i,
                    ignore_eos=True,
                )
                for i in range(8)
            ]
            theirs = plain.generate(prompts, params, use_tqdm=False)
            for _ in range(1 if swaps is None else 2):
                ours = tree.generate(prompts, params, use_tqdm=False)
                for mine, right in zip(ours, theirs, strict=True):
                    if mine.outputs[0].token_ids != right.outputs[0].token_ids:
                        raise SystemExit(f"different: batch {batch}, prompt {mine.prompt!r}")
                    compared += len(mine.outputs[0].token_ids)
                    bar.update(len(mine.outputs[0].token_ids))
            batch += 1
    if swaps is not None:
        swaps.require(swaps=100, accepted=compared // 100)
    if num_ranks > 1:
        ranks.require(tree, policy, compared)
    return compared, time.monotonic() - began, swaps


def start_swaps(engine: Any, speculative: dict[str, Any], other: Path) -> Swaps:
    """Let every step of an engine swap weights from now on."""
    runner = runner_of(engine)
    two = speculative.get("second_drafter", {}).get("kind") == "specblock"
    versions = make_versions(Path(speculative["model"]), other)
    swaps = Swaps(runner.speculator, versions, (0, 1) if two else (0,))
    runner.speculator.propose = swaps.around(runner.speculator.propose)
    adaptive = getattr(runner, "adaptive_verification", None)
    if adaptive is not None and not torch.cuda.is_available():
        # Drafts this poor are soon not worth their time, and then there are none to compare.
        adaptive.controller.drafts = lambda *_: True
    return swaps


def chat_texts(folder: Path, tokenizer: Any) -> list[str]:
    """Return the first turns of questions that leave room for an answer, sets in turn."""
    sets = []
    for path in sorted(folder.glob("*.jsonl")):
        chats = [[{"role": "user", "content": q.turns[0]}] for q in read_questions(path)]
        texts = [
            tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            for chat in chats
        ]
        sets.append([t for t in texts if len(tokenizer(t).input_ids) <= _LONGEST - _MOST_NEW])
    if not any(sets):
        raise SystemExit(f"There is no short question in {folder}: give a folder of .jsonl sets.")
    return [text for group in zip_longest(*sets) for text in group if text is not None]


def main(
    combination: Annotated[str, typer.Option(help="Its name, or all.")] = "all",
    tokens: Annotated[int, typer.Option(min=1, help="To compare per combination, at least.")] = (
        20_000
    ),
    nodes: Annotated[int, typer.Option(help="Nodes of the draft tree.")] = 24,
    drafter: Annotated[Path, typer.Option(help="A SpecBlock drafter.")] = pair.DRAFTER,
    second: Annotated[Path, typer.Option(help="Another.")] = ROOT / "examples/two_heads/tables",
    eagle: Annotated[Path, typer.Option("--eagle3", help="An EAGLE-3 drafter.")] = pair.EAGLE3,
    target: Annotated[Path, typer.Option(help="The model that is drafted for.")] = pair.TARGET,
    questions: Annotated[
        Path | None, typer.Option(help="Folder of .jsonl sets that another target answers.")
    ] = None,
    graphs: Annotated[
        bool, typer.Option(help="Decode from CUDA graphs; adaptive on a GPU does anyway.")
    ] = False,
    swaps: Annotated[
        bool, typer.Option(help="Give SpecBlock drafters other weights twice in every step.")
    ] = False,
    num_ranks: Annotated[
        int, typer.Option("--ranks", min=1, help="Tensor-parallel ranks, on one machine.")
    ] = 1,
) -> None:
    """Compare one combination, or all of them."""
    choices = combinations(str(drafter), str(second), str(eagle), nodes)
    if swaps:
        choices = {name: keys for name, keys in choices.items() if keys["kind"] == "specblock"}
    if num_ranks > 1:
        choices = of_ranks(choices["SpecBlock"])
    if combination != "all":
        known("combination", [combination], choices)
        # vLLM has no adaptive verification without graphs, save on a CPU.
        adaptive = choices[combination].get("enable_adaptive_verification", False)
        graphs = graphs or (adaptive and torch.cuda.is_available())
        other = second if swaps else None
        compared, seconds, done = compare(
            choices[combination], tokens, graphs, target, questions, other, num_ranks
        )
        how = ["float32", "batch 8"]
        how += ["CUDA graphs"] if graphs else []
        how += [f"{num_ranks} ranks"] if num_ranks > 1 else []
        if done:
            how += [f"{done.count.total()} swaps", f"{done.accepted} drafts accepted"]
        print(
            f"{combination}: {compared} tokens compared in {seconds:.0f} s, 0 different "
            f"({', '.join(how)})",
            flush=True,
        )
        return
    command = [sys.executable, __file__, *sys.argv[1:]]
    failed = [
        name for name in choices if subprocess.run([*command, f"--combination={name}"]).returncode
    ]
    print(
        f"{len(choices) - len(failed)} of {len(choices)} combinations are exact"
        + "".join(f"\nnot exact, or failed: {name}" for name in failed)
    )
    raise typer.Exit(bool(failed))


if __name__ == "__main__":
    typer.run(main)
