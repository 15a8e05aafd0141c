"""The folder between engine and trainer: private, bounded, and whole whenever it is read."""

from __future__ import annotations

import os
import shutil
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.adapting import VOCAB, Pair, staged, wait
from support.records import random_record, small_drafter

from vllm_specblock.adapt import versions as versions_module
from vllm_specblock.adapt.link import folder_link
from vllm_specblock.adapt.link.finished import Finished
from vllm_specblock.adapt.link.folder_link import FolderLink, FolderSource, make_shared_folder
from vllm_specblock.adapt.policy.interface import Action, FinishedRequest
from vllm_specblock.drafters.common.checkpoint_files import WEIGHTS
from vllm_specblock.train.config import TrainError

REQUEST = FinishedRequest(1.5, 7, 19, 0.1 + 0.2)


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "requests"


def link_of(pair: Pair, folder: Path, **more) -> FolderLink:
    return FolderLink(folder, pair.versions(folder / "versions"), **{"slots": 64, **more})


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("request-*"))


def same(record, other) -> bool:
    for one, two in zip(vars(record).values(), vars(other).values(), strict=True):
        alike = torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two
        if not alike or getattr(one, "dtype", None) != getattr(two, "dtype", None):
            return False
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_requests_come_out_as_they_went_in_and_their_files_are_gone(pair, folder, caplog, dtype):
    link = link_of(pair, folder)
    assert "text can be read" in caplog.text
    records = [random_record(f"r {n} ü", rows=1 + n, prompt=0, seed=n) for n in range(5)]
    records = [replace(r, states=r.states.to(dtype), last=r.last.to(dtype)) for r in records]
    given = [*((record, REQUEST) for record in records), (None, REQUEST), (records[0], None)]
    assert all(link.offer(*each) for each in given) and not link.offer(None, None)
    link.close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and len(files(folder)) == len(given)
    assert {stat.S_IMODE(path.stat().st_mode) for path in files(folder)} == {0o600}
    source = FolderSource(folder)
    for record, request in given:
        found = source.next()
        assert found.request == request
        assert found.record is None if record is None else same(found.record, record)
    assert source.next() is None and not files(folder)


def test_what_has_no_room_is_not_written(pair, folder):
    room = 50_000
    link = link_of(pair, folder, room=room)
    record, request = pair.request(1)
    taken = 0
    for _ in range(6):
        taken += link.offer(record, request)
        wait(link._waiting.empty)
        time.sleep(0.01)
    link.close()
    assert 1 <= len(files(folder)) < 6 and not link.offer(record, request)
    assert taken == len(files(folder)) + link.counts["dropped_records"]
    assert sum(path.stat().st_size for path in files(folder)) <= room


def test_an_engine_that_offers_faster_than_a_disk_drops(pair, folder, monkeypatch):
    monkeypatch.setattr(FolderLink, "_write", lambda self, message: time.sleep(0.05))
    link = link_of(pair, folder, slots=2)
    began = time.perf_counter()
    taken = [link.offer(*pair.request(1)) for _ in range(8)]
    assert time.perf_counter() - began < 0.3 and not all(taken)
    link.close()


def test_files_that_cannot_be_read_are_dropped(pair, folder):
    link = link_of(pair, folder)
    for number in range(4):
        link.offer(*pair.request(number))
    link.close()
    first, second, third, _ = files(folder)
    first.write_bytes(first.read_bytes()[:700])
    second.write_bytes(b"\\0" * 64)
    message = Finished.load(third)
    Finished(None, None).save(third)
    Finished(replace(message.record, request=7), message.request).save(first)  # no id, but whole
    source = FolderSource(folder)
    assert [source.next().record.request, source.next().record] == [7, None]
    assert source.next().record.request == "request 3"
    assert source.tally["dropped_records"] == 1 and not files(folder)
    with pytest.raises(TrainError, match="no folder"):
        FolderSource(folder / "none")


def test_one_engine_writes_to_a_folder(pair, folder):
    link = link_of(pair, folder)
    with pytest.raises(TrainError, match=r"Another engine or trainer uses the folder.*own\.$"):
        link_of(pair, folder)
    link.close()
    left = folder / ".request-1.safetensors"
    left.write_text("half a request")  # of an engine that was killed
    link_of(pair, folder).close()
    assert not left.exists()
    shutil.rmtree(folder)
    folder.write_text("a file")
    with pytest.raises(TrainError, match=r"cannot be used \(.*give one of your own\.$"):
        link_of(pair, folder)


def test_both_ends_tell_each_other_what_they_count(pair):
    link = pair.link()
    source = FolderSource(link.folder)
    source.count("updates_full", 3)
    source.count("judged_gain_millitokens", -5)
    source.tell()
    assert wait(lambda: link.counts["updates_full"]) == 3
    assert link.counts["judged_gain_millitokens"] == -5
    link.took(folder_link.StagedVersion(1, 0, Action.HEADS, {}), 0.25)
    assert source.swap_seconds(Action.HEADS) == 0.25
    assert source.swap_seconds(Action.FULL) == 0.0
    assert FolderSource(link.folder).tally["updates_full"] == 3, "a later trainer counts on"
    link.close()


def test_a_folder_in_shared_memory_goes_with_its_engine(pair):
    link = pair.link()
    assert link.folder.parent == folder_link.SHARED_MEMORY
    assert stat.S_IMODE(link.folder.stat().st_mode) == 0o700
    other = pair.link()  # which leaves the first one alone
    assert link.folder.is_dir()
    link.close()
    assert not link.folder.exists() and other.folder.is_dir()
    os.close(other._lock)  # as a kill does
    third = pair.link()
    assert not other.folder.exists()
    third.close()


@pytest.mark.parametrize("where", ["small", "none"])
def test_too_little_shared_memory_is_one_sentence(tmp_path, monkeypatch, where):
    monkeypatch.setattr(folder_link, "SHARED_MEMORY", tmp_path if where == "small" else Path("/no"))
    with pytest.raises(TrainError, match=r"MiB left, but .* needs .* name a folder .*\.$"):
        make_shared_folder(1, 1 << 60)
    assert not list(tmp_path.iterdir())


def test_heads_alone_are_read_where_the_trunk_serves_already(pair, folder):
    versions = pair.versions(folder / "versions")
    versions.lock()

    def offer(seed: int, trunk: str | None) -> None:
        facts = {"parent": None, **({} if trunk is None else {"trunk": trunk})}
        versions.use(versions.write(small_drafter(seed, vocab=VOCAB), facts))

    link = link_of(pair, folder)
    offer(1, "delivered")
    heads = staged(link)
    assert heads.action is Action.HEADS
    assert set(heads.tensors) == {"lm_head.weight", "rank_head.0.weight", "rank_head.2.weight"}
    link.took(heads)
    offer(2, None)  # another trunk, which the engine did not take in time
    offer(3, versions.listed()["version-00002"]["checksum"])
    full = staged(link)
    assert (full.number, full.action) == (3, Action.FULL)
    # Read before the one above was taken: its heads would go onto another trunk.
    offer(4, "delivered")
    link._look()
    link.took(full)
    assert link.staged() is None
    again = staged(link)
    assert (again.number, again.action) == (4, Action.FULL)
    link.close()


def test_a_version_that_cannot_serve_is_reported_once(pair, folder, caplog):
    versions = pair.versions(folder / "versions")
    versions.lock()
    name = versions.write(small_drafter(vocab=VOCAB), {"parent": None})
    versions.use(name)
    (versions.out / name / WEIGHTS).write_bytes(b"half")
    link = link_of(pair, folder)
    (line,) = [each for each in caplog.messages if "current version" in each]
    assert "not those that were written" in line and line.count(". ") == 0 and line.endswith(".")
    assert staged(link) is None and link.counts["versions_refused_checksum"] == 1
    link.close()


@pytest.mark.parametrize("place, name", [(versions_module, "_digest"), (versions_module, "opened")])
def test_a_version_pruned_while_it_is_read_gives_way_to_the_newest(
    pair, folder, monkeypatch, place, name
):
    versions = pair.versions(folder / "versions")
    versions.lock()
    link = link_of(pair, folder)
    real = getattr(place, name)

    def late(*args, **more):
        monkeypatch.setattr(place, name, real)
        versions.use(versions.write(small_drafter(2, vocab=VOCAB), {"parent": None}))
        versions.prune(1)
        return real(*args, **more)

    first = versions.write(small_drafter(1, vocab=VOCAB), {"parent": None})
    with link._looking:  # its thread waits
        versions.use(first)
        monkeypatch.setattr(place, name, late)
    assert wait(link.current).number == 2 and versions.names() == ["version-00002"]
    assert link.counts["versions_refused_checksum"] == 0
    link.close()
