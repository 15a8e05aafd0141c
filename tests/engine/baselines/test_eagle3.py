"""The EAGLE-3 baseline is EAGLE-3: vLLM's own `eagle3` loads what it saves and drafts the same."""

from __future__ import annotations

import pytest
import torch
from baselines.eagle3 import Eagle3
from safetensors.torch import load_file
from support.engines import TARGET, Engine, make_engine, prompts, record_drafts
from vllm import SamplingParams

from vllm_specblock.drafters.eagle3.growth import DynamicTreeConfig
from vllm_specblock.train.data.batch import Batch
from vllm_specblock.train.learner import EvalSequence, TrainBatch
from vllm_specblock.train.target.answers import continue_prompts
from vllm_specblock.train.target.features import OnlineTeacher, load_target

DRAFTED, UPDATES, LAYERS = 3, 60, (2, 3, 4)
PROMPTS = prompts(4)
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module")
def target():
    return load_target(TARGET, "fp32", torch.device("cpu"))


@pytest.fixture(scope="module")
def teacher_and_learner(target):
    """An EAGLE-3 that was briefly taught the target's continuations of random prompts.

    Its vocabulary leaves out every fifth token, so that the mapping matters.
    """
    torch.manual_seed(0)
    texts = continue_prompts(target, list(torch.randint(3, 2048, (48, 8))), 56)
    texts = [torch.nn.functional.pad(text, (0, 64 - len(text)), value=-1) for text in texts]
    batch = Batch.of(torch.stack(texts))
    t2d = torch.arange(2048) % 5 != 4
    draft_ids = t2d.nonzero()[:, 0]
    teacher = OnlineTeacher(target, LAYERS, draft_ids)
    learner = Eagle3.for_target(
        target.config,
        draft_ids - torch.arange(len(draft_ids)),
        t2d,
        0,
        teacher.head,
        steps=DRAFTED,
        growth=DynamicTreeConfig(DRAFTED, 1, DRAFTED),
        intermediate_size=256,
    )
    optimizer = torch.optim.AdamW(learner.parameters(), lr=2e-3)
    for step in range(UPDATES):
        part = batch[8 * (step % 6) : 8 * (step % 6) + 8]
        outcome = learner(TrainBatch(part, teacher.teach(part), teacher.embed, step, 0))
        optimizer.zero_grad()
        outcome.loss.backward()
        optimizer.step()
    return teacher, learner


@pytest.fixture(scope="module")
def engine(teacher_and_learner, tmp_path_factory) -> Engine:
    directory = tmp_path_factory.mktemp("eagle3")
    learner = teacher_and_learner[1]
    learner.save(directory)
    # From here on ours has the rounded weights, too.
    learner.load_state_dict(load_file(directory / "model.safetensors"))
    return make_engine(
        {"method": "eagle3", "model": str(directory), "num_speculative_tokens": DRAFTED}
    )


def test_vllm_drafts_what_the_baseline_drafts(engine, plain, teacher_and_learner, monkeypatch):
    """Same tokens as without a drafter, and step by step the same draft."""
    teacher, learner = teacher_and_learner
    drafts = record_drafts(engine, monkeypatch)
    same = steps = accepted = 0
    for prompt in PROMPTS:
        drafts.clear()
        ((answer,),) = engine.generate([prompt], GREEDY)
        ((expected,),) = plain.generate([prompt], GREEDY)
        assert answer.tokens == expected.tokens
        text = torch.tensor(prompt + answer.tokens)
        batch = Batch.of(text[None])
        target_outputs = teacher.teach(batch)
        sequence = EvalSequence(
            text, len(prompt), target_outputs.hidden[0], target_outputs.last[0], teacher.embed
        )
        draft = learner.draft_along(sequence)
        root = len(prompt)
        for theirs in drafts:
            if root + DRAFTED >= len(text):
                break
            ours = draft(root).token[0].tolist()
            same += ours == theirs
            steps += 1
            wanted = text[root + 1 :].tolist()
            right = next((k for k in range(DRAFTED) if theirs[k] != wanted[k]), DRAFTED)
            accepted += right
            root += right + 1
    assert steps > 60
    assert accepted / steps > 0.3  # else the comparison says little
    # Two tokens that score the same to the last bits may change places.
    assert same >= 0.98 * steps, f"{same} of {steps}"
