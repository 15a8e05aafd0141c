"""`vllm serve <drafter>` as a user starts it: completions, chat, and the stock metrics."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from lib.server import Server
from openai import OpenAI
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
def process(tmp_path_factory):
    """A server that is given the drafter's folder alone, and its address."""
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
        yield server.process, server.address
    finally:
        server.close()


def post(url: str, **body) -> dict:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return json.load(urllib.request.urlopen(request, timeout=120))


def test_a_request_opts_out_of_drafts(process):
    """A wrong value gets HTTP 400; the server keeps running."""
    _, server = process
    body = {"model": DRAFTER, "prompt": "class Reader:\n", "max_tokens": 24, "temperature": 0}
    plain = post(f"{server}/v1/completions", **body)["choices"]
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(f"{server}/v1/completions", **body, vllm_xargs={"specblock_draft": "off"})
    assert refused.value.code == 400
    assert "\"specblock_draft\" is 'off'" in json.load(refused.value)["error"]["message"]
    for no in (False, 0):
        answer = post(f"{server}/v1/completions", **body, vllm_xargs={"specblock_draft": no})
        assert answer["choices"][0]["text"] == plain[0]["text"]
        own = (answer["metrics"] or {}).get("speculative_decoding") or {"num_draft_tokens": 0}
        assert own["num_draft_tokens"] == 0


def test_a_user_session(process, plain):
    _, server = process
    prompt = "class Reader:\n    def __init__(self, name):\n"
    (model,) = [
        entry["id"] for entry in json.load(urllib.request.urlopen(f"{server}/v1/models"))["data"]
    ]
    whole = post(
        f"{server}/v1/completions", model=model, prompt=prompt, max_tokens=64, temperature=0
    )
    (answer,) = whole["choices"]
    ids = plain.llm.get_tokenizer()(prompt)["input_ids"]
    (expected,) = plain.generate([ids], SamplingParams(temperature=0, max_tokens=64))[0]
    assert answer["text"] == expected.text

    # The first token is the prompt's; each step after it adds its accepted nodes and one.
    own = whole["metrics"]["speculative_decoding"]
    assert own["num_spec_steps"] == len(own["per_step_accepted"]) > 0
    assert 1 + own["num_accepted_draft_tokens"] + own["num_spec_steps"] == 64

    client = OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)
    chat = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "write a class"}], max_tokens=24, seed=3
    )
    assert chat.usage.completion_tokens == 24 or chat.choices[0].finish_reason == "stop"

    metrics = urllib.request.urlopen(f"{server}/metrics").read().decode()

    def counter(name: str) -> list[float]:
        found = re.findall(rf"^vllm:spec_decode_num_{name}_total{{.*}} ([\d.e+]+)$", metrics, re.M)
        return [float(value) for value in found]

    (drafts,), (nodes,), (accepted,) = map(counter, ("drafts", "draft_tokens", "accepted_tokens"))
    assert drafts > 0 and nodes <= 60 * drafts and accepted > 0
    by_depth = counter("accepted_tokens_per_pos")
    assert by_depth[0] <= drafts and by_depth == sorted(by_depth, reverse=True)
    assert sum(by_depth) == accepted and not any(by_depth[8:]), "two blocks of four go no deeper"
    assert model == DRAFTER

    dashboard = unanswered(metrics)
    assert not {name for name in dashboard if "specblock" not in name}, "vLLM's own"
    assert "vllm:specblock_chosen_trees_total" not in dashboard


def test_ctrl_c_with_a_request_in_flight(process):
    """The server ends within seconds, and none of its processes is left. The last test here."""
    running, address = process
    body = {"model": DRAFTER, "prompt": "class ", "max_tokens": 480, "ignore_eos": True}
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps({**body, "stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    children = psutil.Process(running.pid).children(recursive=True)
    with urllib.request.urlopen(request, timeout=120) as stream:
        assert stream.readline().startswith(b"data: ")
        running.send_signal(signal.SIGINT)
    # vLLM 0.32 may wait for the client's connection to close, with or without us.
    assert running.wait(timeout=60) == 0
    assert children and not psutil.wait_procs(children, timeout=5)[1]
