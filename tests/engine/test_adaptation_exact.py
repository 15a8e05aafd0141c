"""Serving while a drafter adapts: the tokens are vLLM's own, and records match the text.

What changes when weights are swapped: `lib.weight_swaps`. `benchmarks/exactness.py --swaps`
compares more tokens.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
import torch
from lib.weight_swaps import Swaps, Versions, make_versions
from support.engines import DRAFTER, ROOT, Engine, make_engine, note_calls, record_preemptions
from support.matrix import CASES, PROMPTS, Checker, crowded_engine, no_pause, params, to_the_limit
from support.recorded_graph import capture
from vllm import SamplingParams

from vllm_specblock.adapt.book import Record
from vllm_specblock.adapt.learning.train_batches import PROMPT_ROWS
from vllm_specblock.adapt.policy.interface import FinishedRequest
from vllm_specblock.adapt.serving import recorder as recording
from vllm_specblock.adapt.serving.slabs import SLABS
from vllm_specblock.drafters.common.linear import PackedLinear
from vllm_specblock.drafters.specblock.refresh import prepare, refresh

WATCH = {"adapt": {"policy": "watch"}}
TABLES = ROOT / "examples/two_heads/tables"
NAMES = ["greedy", "sampled log-probabilities", "presence penalty, sampled"]
check = Checker()


@pytest.fixture(scope="module")
def versions() -> Versions:
    return make_versions(DRAFTER, TABLES)


def swapping(engine: Engine, versions: Versions, monkeypatch, heads=(0,)) -> Swaps:
    swaps = Swaps(engine.speculator, versions, heads)
    monkeypatch.setattr(engine.speculator, "propose", swaps.around(engine.speculator.propose))
    return swaps


@pytest.fixture
def engine(tree, versions):
    """The shared engine, which gets its own weights back, and caches without rows of others.

    Weights that are too large leave NaN in them.
    """
    yield tree
    (drafter,) = tree.speculator.draft_policy.drafters
    refresh(drafter.model, versions["trained"])
    for cache in drafter.attention_builder.caches:
        cache.zero_()
    tree.llm.reset_prefix_cache()


def test_swaps_change_no_token(engine, versions, reference, monkeypatch):
    """The second time, prefix hits bring keys and values of weights that are gone."""
    swaps, texts = swapping(engine, versions, monkeypatch), PROMPTS[:8]
    cases = [params(8, max_tokens=60, **CASES[name]) for name in NAMES]
    requests = [cases[index % len(cases)][index] for index in range(8)]
    for _ in range(2):
        check(engine, requests, reference("three cases, 60", requests, texts), texts)
    swaps.require(100, accepted=20)


@pytest.fixture(scope="module")
def small_cache() -> Engine:
    """Two drafters, of which the second is recorded, and room for half of eight requests."""
    second = {"second_drafter": {"model": str(TABLES), **WATCH}, "draft_policy": "merge"}
    adaptive = {"num_speculative_tokens": 10, "enable_adaptive_verification": True}
    return crowded_engine(second | adaptive)


@pytest.fixture
def crowded(small_cache, monkeypatch) -> Engine:
    # Drafts by other weights are soon not worth their time.
    no_pause(small_cache, monkeypatch)
    flush(small_cache)
    return small_cache


def test_swaps_while_crowded(crowded, versions, reference, monkeypatch):
    """Both drafters change; chunked prompts, preemption, budgets and the length limit. A request
    that resumes is another one to the recorder."""
    preempted, sink = record_preemptions(crowded), kept(crowded, monkeypatch)
    swaps = swapping(crowded, versions, monkeypatch, heads=(0, 1))
    expected = reference("to the limit", to_the_limit())
    check(crowded, to_the_limit(), expected)
    whole = [[*text, *answer[0].tokens] for text, answer in zip(PROMPTS, expected)]
    flush(crowded)
    assert preempted, "the cache was large enough for every request: this tested no preemption"
    swaps.require(200, accepted=40)
    assert len(sink.offers) > len(whole)
    assert_no_gap(sink.records, whole)


@dataclass
class Kept:
    """A sink that keeps everything."""

    offers: list[tuple[Record, FinishedRequest | None]] = field(default_factory=list)
    room: bool = True

    def offer(self, record, finished) -> bool:
        if self.room:
            self.offers.append((record, finished))
        return self.room

    @property
    def records(self) -> list[Record]:
        return [record for record, _ in self.offers]


def kept(engine: Engine, monkeypatch) -> Kept:
    sink = Kept()
    monkeypatch.setattr(engine.speculator.recorder, "sink", sink)
    return sink


def flush(engine: Engine, slabs: int = SLABS) -> None:
    """vLLM says that a request is done when it takes its next step."""
    recorder = engine.speculator.recorder
    for request in list(recorder._slots):
        recorder.end(request)
    for _ in range(1000):
        if len(recorder.slabs.free) == slabs:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        recorder._hand_on()
    raise AssertionError("a slab never came back")


@pytest.fixture(scope="module")
def watching() -> Engine:
    engine = make_engine({"num_speculative_tokens": 24, **WATCH})
    assert not any(engine.speculator.recorder.counts().values()), "warm-up requests were recorded"
    return engine


def rebuilt(record: Record, text: list[int], prompt: int) -> int:
    """Hold a record against its request's tokens; gives its first position."""
    tokens = record.tokens.tolist()
    for begin in range(len(text) - 1):
        if text[begin + 1 : begin + 1 + len(tokens)] == tokens[: len(text) - begin - 1]:
            labels = [begin + 1 + place >= prompt for place in range(len(tokens))]
            if labels == record.labels.tolist():
                return begin
    raise AssertionError("a record is of no text")


def test_watching_changes_no_draft_and_no_token(tree, watching, reference, monkeypatch):
    drafts, sink = [], kept(watching, monkeypatch)
    requests, texts = params(8, max_tokens=90, presence_penalty=0.9), PROMPTS[:8]
    for number, request in enumerate(requests):
        request.temperature = 0.8 * (number % 2)
    expected = reference("half sampled, 90", requests, texts)
    for engine in (tree, watching):
        # As if nothing had been served.
        engine.llm.reset_prefix_cache()
        engine.speculator.forget_warm_up()
        slots = engine.speculator.tree_states

        def note(tokens, batch, *_, slots=slots, **__) -> list[list]:
            trees = slots.parent[batch.idx_mapping], slots.score[batch.idx_mapping]
            return [each.tolist() for each in (tokens, *trees)]

        drafts.append(note_calls(monkeypatch, engine.speculator, "propose", note))
        check(engine, requests, expected, texts)
    assert drafts[0] == drafts[1] and len(drafts[0]) > 10
    flush(watching)
    assert len(sink.offers) == 8
    by_number = sorted(sink.offers, key=lambda offer: int(offer[0].request.split("-")[0]))
    for (record, finished), text, answer in zip(by_number, texts, expected):
        whole = [*text, *answer[0].tokens]
        begin = rebuilt(record, whole, len(text))
        assert max(0, len(text) - PROMPT_ROWS) <= begin < len(text)  # later behind a cached prefix
        # The last step may have accepted more than was asked for.
        assert len(record.tokens) >= len(whole) - 1 - begin
        assert finished.steps > 0 and finished.seconds > 0
        assert finished.steps <= finished.tokens and finished.misses <= finished.steps
        assert record.tau == finished.tau
    assert sum(finished.misses for _, finished in by_number) > 0


def assert_no_gap(records: list[Record], texts: list[list[int]]) -> None:
    for record in records:
        # The last step may have accepted more than was asked for.
        spelled = ",".join(map(str, record.tokens.tolist()[:-5]))
        assert any(spelled in ",".join(map(str, text)) for text in texts)


def test_pauses_end_recordings(crowded, monkeypatch, reference):
    preempted, sink = record_preemptions(crowded), kept(crowded, monkeypatch)
    steps, controller = itertools.count(1), crowded.runner.adaptive_verification.controller
    monkeypatch.setattr(controller, "drafts", lambda *_: next(steps) % 12 <= 8)
    requests, texts = params(3, max_tokens=90), PROMPTS[:3]
    expected = reference("three, 90", requests, texts)
    check(crowded, requests, expected, texts)
    flush(crowded)
    assert sink.offers and next(steps) > 13 and not preempted
    assert_no_gap(sink.records, [[*t, *a[0].tokens] for t, a in zip(texts, expected)])
    assert any(len(record.tokens) < 60 for record in sink.records)


def test_more_requests_than_slabs(watching, monkeypatch):
    sink, recorder = kept(watching, monkeypatch), watching.speculator.recorder
    monkeypatch.setattr(recorder.slabs, "free", recorder.slabs.free[:3])
    before = recorder.counts()
    watching.generate(PROMPTS[:8], params(8, max_tokens=6))
    flush(watching, slabs=3)
    counts = {name: n - before[name, 0] for (name, _), n in recorder.counts().items()}
    assert len(sink.offers) == 3 == counts[recording.RECORDED]
    assert counts[recording.UNRECORDED] == 5
    assert counts[recording.RECORDED_TOKENS] == sum(int(r.labels.sum()) for r in sink.records)
    sink.room = False
    watching.generate(PROMPTS[:1], params(1, max_tokens=6))
    flush(watching, slabs=3)
    assert recorder.counts()[recording.UNRECORDED, 0] == before[recording.UNRECORDED, 0] + 6


def test_last_is_what_the_head_reads(watching, monkeypatch):
    """The law of a row names the greedy target's own token, and states are those of a prefill."""
    sink = kept(watching, monkeypatch)
    watching.llm.reset_prefix_cache()
    (answer,) = watching.generate(PROMPTS[5:6], params(1, max_tokens=100))
    flush(watching)
    (record,) = sink.records
    labels = record.labels
    last = record.last[labels].to(watching.runner.device)
    likeliest = watching.runner.model.compute_logits(last).argmax(-1).cpu()
    assert labels.sum() >= 99 and torch.equal(likeliest, record.tokens[labels])
    # Read as a prompt, the same text leaves the same rows, in other sums.
    sink.offers.clear()
    watching.llm.reset_prefix_cache()
    text = [*PROMPTS[5], *answer[0].tokens]
    watching.generate([text], params(1, max_tokens=3))
    flush(watching)
    (again,) = sink.records
    begin = len(PROMPTS[5]) - PROMPT_ROWS
    skip = len(text) - PROMPT_ROWS - begin
    both = len(record.tokens) - skip
    assert both >= PROMPT_ROWS - 2
    for name in ("states", "last"):
        mine, other = getattr(record, name)[skip:], getattr(again, name)[:both]
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=2e-3)


def anywhere(engine: Engine, sink: Kept, text: list[int]) -> bool:
    """Whether three tokens of a text stand side by side in slabs, or in what was handed on."""
    rows = [*engine.speculator.recorder.slabs.tensors.token, *(r.tokens for r in sink.records)]
    trigrams = {tuple(text[at : at + 3]) for at in range(len(text) - 2)}
    there = (row.unfold(0, 3, 1).tolist() for row in rows if len(row) > 2)
    return any(tuple(each) in trigrams for row in there for each in row)


def test_who_opted_out_is_in_no_buffer(watching, monkeypatch):
    sink, recorder = kept(watching, monkeypatch), watching.speculator.recorder
    slabs = recorder.slabs.tensors
    watching.llm.reset_prefix_cache()
    for tensor in (slabs.token, slabs.states, slabs.last):
        tensor.zero_()
    private, others = [2000 - at for at in range(90)], PROMPTS[:4]
    requests = params(5, max_tokens=40)
    requests[2].extra_args = {recording.SAYS: 0}
    before = recorder.counts()[recording.OPTED_OUT, 0]
    texts = [*others[:2], private, *others[2:]]
    answers = watching.generate(texts, requests)
    flush(watching)
    assert recorder.counts()[recording.OPTED_OUT, 0] == before + 1 and len(sink.offers) == 4
    assert not anywhere(watching, sink, private)
    for text, (answer,) in zip(others[:2], answers):
        assert anywhere(watching, sink, [*text, *answer.tokens])
    # Its answer may say what others say; alone, it leaves no trace.
    untouched = [tensor.clone() for tensor in slabs]
    watching.generate([private], [requests[2]])
    flush(watching)
    assert all(map(torch.equal, untouched, slabs)) and len(sink.offers) == 4


def test_marked_requests_only():
    said = [None, 1, "1", True, 1.0, 0, "0", False, "no", 2]  # what is unclear is a no
    asked = [SamplingParams(extra_args={recording.SAYS: each}) for each in said]
    found = [recording.wanted(params, "marked") for params in (SamplingParams(), *asked)]
    assert found == [False, False, *[True] * 4, *[False] * 5]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a recording knows no compiled kernels")
def test_a_graph_drafts_and_records_by_the_new_weights(watching, versions, reference, monkeypatch):
    """A graph reads addresses: it does what eager steps do under the same swaps."""
    speculator, requests = watching.speculator, params(3, max_tokens=40)
    model = speculator.draft_policy.drafters[0].model
    monkeypatch.setattr(speculator, "pad_rows", True)
    monkeypatch.setattr(PackedLinear, "takes", lambda linear: False)  # packed ones are replaced
    for name, module in prepare(model, versions["trained"]).named_modules():
        if isinstance(module, torch.nn.Linear):
            model.set_submodule(name, module)
    expected = reference("three for a graph", requests, PROMPTS[:3])

    def start_again() -> None:
        watching.llm.reset_prefix_cache()
        speculator.forget_warm_up()
        refresh(model, versions["trained"])

    def served() -> tuple[list[list], list]:
        start_again()
        with monkeypatch.context() as patch:
            sink = kept(watching, patch)
            drafts = note_calls(patch, speculator, "propose", lambda of, *_, **__: of.tolist())
            swapping(watching, versions, patch)
            check(watching, requests, expected, PROMPTS[:3])
            flush(watching)
        return drafts, sink.offers

    drafts, eager = served()
    graphs = capture(watching, monkeypatch, [25 * count for count in (1, 3)])
    again, replayed = served()
    assert again == drafts
    assert sum(graph.replays for graph in graphs.values()) > 0.7 * len(drafts)
    assert len(eager) == len(replayed) == 3
    for (one, done), (other, over) in zip(eager, replayed):
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.labels, other.labels)
        assert (done.steps, done.tokens) == (over.steps, over.tokens)
        torch.testing.assert_close(one.states, other.states, rtol=1e-3, atol=2e-3)
        torch.testing.assert_close(one.last, other.last, rtol=1e-3, atol=2e-3)
    start_again()
