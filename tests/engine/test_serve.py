"""`vllm serve <drafter>` as a user starts it: completions, chat, and the stock metrics."""

from __future__ import annotations

import re
import shutil
import signal
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest
from lib.server import Server
from openai import BadRequestError, OpenAI
from support.dashboard import unanswered
from support.engines import ROOT
from support.processes import SWITCHES
from vllm import SamplingParams

DRAFTER = "examples/tiny_pair/drafter"
pytestmark = pytest.mark.skipif(
    shutil.which("vllm", path=str(Path(sys.executable).parent)) is None,
    reason="the vllm command is not installed",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server that is given the drafter's folder alone."""
    options = (
        "--dtype float32 --enforce-eager --max-model-len 512 --max-num-seqs 8 "
        f"--kv-cache-memory-bytes {256 << 20} --gpu-memory-utilization 0.3 "
        "--per-request-spec-decode-metrics detailed"
    )
    log = tmp_path_factory.mktemp("serve") / "log"
    # A shell starts jobs in the background with Ctrl-C ignored, and that is inherited.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    server = Server([DRAFTER, *options.split()], log, dict.fromkeys(SWITCHES), ROOT)
    signal.signal(signal.SIGINT, before)
    try:
        server.wait()
        yield server
    finally:
        server.close()


@pytest.fixture
def client(server) -> OpenAI:
    return OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=120)


def test_a_request_opts_out_of_drafts(client):
    """A wrong value gets HTTP 400; the server keeps running."""

    def complete(**vllm_xargs):
        body = {"model": DRAFTER, "prompt": "class Reader:\n", "max_tokens": 24, "temperature": 0}
        return client.completions.create(**body, extra_body={"vllm_xargs": vllm_xargs})

    plain = complete()
    with pytest.raises(BadRequestError) as refused:
        complete(specblock_draft="off")
    assert "\"specblock_draft\" is 'off'" in refused.value.body["message"]
    for no in (False, 0):
        answer = complete(specblock_draft=no)
        assert answer.choices[0].text == plain.choices[0].text
        own = (answer.metrics or {}).get("speculative_decoding") or {"num_draft_tokens": 0}
        assert own["num_draft_tokens"] == 0


def test_a_user_session(server, client, plain):
    (model,) = [entry.id for entry in client.models.list()]
    assert model == DRAFTER
    prompt = "class Reader:\n    def __init__(self, name):\n"
    whole = client.completions.create(model=model, prompt=prompt, max_tokens=64, temperature=0)
    ids = plain.llm.get_tokenizer()(prompt)["input_ids"]
    (expected,) = plain.generate([ids], SamplingParams(temperature=0, max_tokens=64))[0]
    assert whole.choices[0].text == expected.text

    # The first token is the prompt's; each step after it adds its accepted nodes and one.
    own = whole.metrics["speculative_decoding"]
    assert own["num_spec_steps"] == len(own["per_step_accepted"]) > 0
    assert 1 + own["num_accepted_draft_tokens"] + own["num_spec_steps"] == 64

    chat = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "write a class"}], max_tokens=24, seed=3
    )
    assert chat.usage.completion_tokens == 24 or chat.choices[0].finish_reason == "stop"

    metrics = urllib.request.urlopen(f"{server.address}/metrics").read().decode()

    def counter(name: str) -> list[float]:
        found = re.findall(rf"^vllm:spec_decode_num_{name}_total{{.*}} ([\d.e+]+)$", metrics, re.M)
        return [float(value) for value in found]

    (drafts,), (nodes,), (accepted,) = map(counter, ("drafts", "draft_tokens", "accepted_tokens"))
    assert drafts > 0 and nodes <= 60 * drafts and accepted > 0
    by_depth = counter("accepted_tokens_per_pos")
    assert by_depth[0] <= drafts and by_depth == sorted(by_depth, reverse=True)
    assert sum(by_depth) == accepted and not any(by_depth[8:]), "two blocks of four go no deeper"

    dashboard = unanswered(metrics)
    assert not {name for name in dashboard if "specblock" not in name}, "vLLM's own"
    assert "vllm:specblock_chosen_trees_total" not in dashboard


def test_ctrl_c_with_a_request_in_flight(server, client):
    """The server ends within seconds, and none of its processes is left. The last test here."""
    running = server.process
    children = psutil.Process(running.pid).children(recursive=True)
    long = {"max_tokens": 480, "extra_body": {"ignore_eos": True}}
    with client.completions.create(model=DRAFTER, prompt="class ", stream=True, **long) as stream:
        assert next(iter(stream)).choices
        running.send_signal(signal.SIGINT)
    # vLLM 0.32 may wait for the client's connection to close, with or without us.
    assert running.wait(timeout=60) == 0
    assert children and not psutil.wait_procs(children, timeout=5)[1]
