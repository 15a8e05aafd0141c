"""vLLM's own Medusa serves the heads that the baseline saves.

It needs vLLM's older model runner (V2 refuses the method), which changes vLLM's modules for the
whole process on a CPU: hence a process of its own. vLLM 0.33 has no Medusa any more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from baselines.medusa import Medusa
from support.engines import ROOT, TARGET, prompts
from vllm.transformers_utils import configs

from vllm_specblock.drafters.specblock.untrained import most_frequent
from vllm_specblock.train.data.batch import Batch
from vllm_specblock.train.learner import TrainBatch
from vllm_specblock.train.target.features import OnlineTeacher, load_target

HEADS, DRAFT_VOCAB, NEW_TOKENS = 4, 600, 48

SERVE = """
import json, sys
from support.engines import make_engine
from vllm import SamplingParams

heads, prompts, new_tokens = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
plain = [one.tokens for one, in make_engine(None).generate(prompts, params)]
engine = make_engine({"method": "medusa", "model": heads, "num_speculative_tokens": 4})
drafted = [one.tokens for one, in engine.generate(prompts, params)]
count = {each.name: each.value for each in engine.llm.get_metrics() if hasattr(each, "value")}
print(json.dumps([plain, drafted, count["vllm:spec_decode_num_accepted_tokens"]]))
"""


@pytest.fixture(scope="module")
def medusa_folder(tmp_path_factory):
    """Heads that learned for a moment what the target goes on with after the test's prompts."""
    torch.manual_seed(0)
    target = load_target(TARGET, "fp32", torch.device("cpu"))
    texts = [
        target.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
        )[0]
        for prompt in asked()
    ]
    batch = Batch.of(torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-1))
    counts = batch.tokens[batch.tokens >= 0].bincount(minlength=target.config.vocab_size)
    d2t, t2d = most_frequent(counts, DRAFT_VOCAB)
    named = t2d.nonzero()[:, 0]
    head = target.get_output_embeddings().weight[named]
    medusa = Medusa.for_target(target.config, d2t, t2d, 0, head, num_heads=HEADS)
    teacher = OnlineTeacher(target, (2, 3, 4), named)
    train_batch = TrainBatch(batch, teacher.teach(batch), teacher.embed, 0, 0)
    optimizer = torch.optim.Adam(medusa.parameters(), 3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        medusa(train_batch).loss.backward()
        optimizer.step()
    folder = tmp_path_factory.mktemp("medusa")
    medusa.save(folder)
    return folder


def asked() -> list[list[int]]:
    return [prompt[:40] for prompt in prompts(4)]


@pytest.mark.skipif(not hasattr(configs, "MedusaConfig"), reason="vLLM has no Medusa from 0.33 on")
def test_vllm_drafts_with_the_saved_heads(medusa_folder):
    arguments = [str(medusa_folder), json.dumps(asked()), str(NEW_TOKENS)]
    environment = os.environ | {
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_PLUGINS": "",
        # Wherever this process has vLLM from, that one needs it, too.
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests/lib"), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", SERVE, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    plain, drafted, accepted = json.loads(done.stdout.splitlines()[-1])
    assert drafted == plain
    assert [len(tokens) for tokens in drafted] == [NEW_TOKENS] * 4
    # In 188 steps without drafts; heads that nobody trained get next to none accepted.
    assert accepted > 40
