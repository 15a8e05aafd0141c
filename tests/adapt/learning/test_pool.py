"""Which version serves, by evidence on fresh texts."""

from __future__ import annotations

import random
from math import exp, nan

from vllm_specblock.adapt.learning.pool import Pool, Version


def serve(pool: Pool, tau, count: int, seed: int = 0):
    """(number of the text, version) of each return; `tau` by number, with a shared spread."""
    draw, found = random.Random(seed), []
    for number in range(1, count + 1):
        text = draw.gauss(0, 0.3)  # paired: what is common to all versions matters little
        told = {v.number: exp(text + draw.gauss(0, 0.06)) / tau[v.number] for v in pool.kept}
        back = pool.judge(told)
        if back is not None:
            found.append((number, back.number))
    return found


def version(number: int) -> Version:
    return Version(number, {})


def test_a_better_version_becomes_the_last_good_one_and_stays():
    pool = Pool(version(0))
    pool.offer(version(1))
    assert (pool.good.number, pool.current.number) == (0, 1)
    assert not serve(pool, {0: 2.0, 1: 2.3}, 200)
    assert pool.good.number == 1
    assert [each.number for each in pool.kept] == [1, 0]


def test_a_worse_version_is_left_for_the_one_before():
    pool = Pool(version(0))
    pool.offer(version(1))
    ((when, back),) = serve(pool, {0: 2.0, 1: 1.5}, 200)
    assert back == 0 == pool.current.number == pool.good.number
    assert 8 < when < 60
    assert pool.returns == [0]


def test_evidence_outlives_offers():
    """Offers come every few texts; were it forgotten, no worse line of versions would be left."""
    pool, found, tau = Pool(version(0)), [], {0: 2.0}
    for number in range(1, 30):
        tau[number] = 1.5
        pool.offer(version(number))
        found += serve(pool, tau, 4, seed=number)
        if found:
            break
    assert found and number < 12


def test_a_domain_that_comes_back_finds_its_version():
    pool = Pool(version(0))
    pool.offer(version(1))
    assert not serve(pool, {0: 2.0, 1: 3.0}, 100)
    ((_, back),) = serve(pool, {0: 3.8, 1: 3.0}, 100)
    assert back == 0
    # What was good elsewhere is kept.
    assert pool.earlier is not None and pool.earlier.number == 1
    ((_, back),) = serve(pool, {0: 2.0, 1: 3.0}, 100)
    assert back == 1


def test_a_version_that_saves_steps_is_kept_though_most_texts_reach_further_with_the_other():
    """Seven texts in ten: 4.0 tokens a step in place of 3.8; the others 1.5 in place of 1.9."""
    pool = Pool(version(0))
    pool.offer(version(1))
    for number in range(200):
        before, after = (4.0, 3.8) if number % 10 < 7 else (1.5, 1.9)
        assert pool.judge({0: 1 / before, 1: 1 / after}) is None
    assert pool.current.number == 1


def test_a_text_too_short_to_say_changes_nothing():
    pool = Pool(version(0))
    pool.offer(version(1))
    assert pool.judge({0: nan, 1: nan}) is None
    assert serve(pool, {0: 2.0, 1: 1.5}, 60)
