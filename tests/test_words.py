"""One word for one thing: names that were given up do not come back, and folders stay small."""

from __future__ import annotations

import io
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*ROOT.glob("vllm_specblock/**/*.py"), *ROOT.glob("triton_kernels/**/*.py")])

# Given up for the field's own: what each became.
OLD_NAMES = {
    "Head": "Drafter",
    "Proposer": "DraftPolicy",
    "Visibility": "TreeMask",
    "BlockSight": "DraftAttentionBuilder",
    "PackedQueries": "TreeAttentionBatch",
    "ReachTable": "AcceptanceEstimator",
    "RestSwitch": "DraftingState",
    "Sharpness": "DraftCalibration",
    "Verdicts": "VerificationResult",
    "Verified": "VerifiedTrees",
    "ImposedAcceptance": "SyntheticAcceptance",
    "TreeSlots": "TreeStates",
    "StepRows": "StepBatch",
    "DecodeRows": "GraphStepBatch",
    "CommittedRows": "CommittedTokens",
    "HeadPlan": "ResolvedDrafter",
    "Lesson": "TrainBatch",
    "Outcome": "LossOutput",
    "Teaching": "TargetOutputs",
    "Student": "TrainState",
    "Journal": "MetricsLog",
    "OUTSIDE": "IGNORE_INDEX",
    "see_trees": "build_tree_mask",
    "window_start": "tree_start",
    "text_row": "req_idx",
    "asleep": "paused",
    "proposer": "draft_policy",
    "heat": "temperature",
    "imposed": "synthetic_acceptance",
    "law": "target_probs",
    "nats": "ce_loss",
    "teaching": "target_outputs",
    "of_nobody": "to_scratch_slot",
    "read_heads": "lm_and_rank_head",
    "best_tokens": "topk_tokens",
}
# `nats` of the n-gram search are the unit.
ALLOWED = {("nats", "triton_kernels/ngram"), ("nats", "triton_kernels/feedback")}

OLD_MODULES = {
    "sight",
    "heads",
    "kv",
    "plan",
    "arguments",
    "refusals",
    "chains",
    "proposal",
    "proposers",
    "reach",
    "rest",
    "costs",
    "verified",
    "verdicts",
    "imposed",
    "parts",
    "serving",
    "sharpness",
    "walk",
    "see_trees",
    "read_heads",
    "best_tokens",
    "block_sight",
    "first_sight",
    "learn_reach",
    "learn_sharpness",
    "offer_nodes",
    "attention_fold",
    "attention_step",
    "attention_tiles",
    "packed",
    "journal",
    "student",
    "teacher",
    "text",
    "draft",
}
MOST_MODULES = 15


def names_in(source: str) -> set[str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_old_name(path):
    place = path.relative_to(ROOT)
    for name in names_in(path.read_text()) & OLD_NAMES.keys():
        if (name, str(place.parent)) not in ALLOWED:
            raise AssertionError(f"{place}: `{name}` is called `{OLD_NAMES[name]}`")


def test_no_old_module():
    for path in SOURCES:
        parts = {*path.relative_to(ROOT).parent.parts[1:], path.stem}
        assert not parts & OLD_MODULES, f"{path}: {parts & OLD_MODULES}"


def test_folders_stay_small():
    """So that a folder is read at a glance; `__init__.py` does not count."""
    count = Counter(path.parent for path in SOURCES if path.name != "__init__.py")
    assert len(count) > 25
    for folder, modules in count.items():
        assert modules <= MOST_MODULES, f"{folder} has {modules} modules"
