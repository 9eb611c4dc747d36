"""Tests of the page pool: reference counts, known prefixes, order of eviction."""

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from spell_jax.sampler.page_pool import Bundle, PagePool, block_digests

A, B, C, D, E = b"a", b"b", b"c", b"d", b"e"


def _find(pool: PagePool, blocks: Sequence[bytes]) -> list[Bundle]:
    """Return the bundles of a prompt's longest prefix of blocks that are in the pool."""
    bundles = []
    for digest in block_digests(blocks):
        if (bundle := pool.find((0, digest))) is None:
            break
        bundles.append(bundle)
    return bundles


def _read(
    pool: PagePool, blocks: Sequence[bytes], max_shared: int | None = None, groups: int = 1
) -> list[Bundle]:
    """Take the bundles of a prompt: known bundles are shared, other bundles are new.

    Args:
      max_shared: maximum number of known bundles to share.
      groups: pages of a bundle.
    """
    shared = _find(pool, blocks[:max_shared])
    pool.hold(shared)
    bundles = list(shared)
    for digest in block_digests(blocks)[len(shared) :]:
        bundles.append(pool.take(groups))
        pool.name(bundles[-1], (0, digest))
    return bundles


# ------------------------------------------------------------------------------------------- Users


def test_each_page_is_taken_once_and_page_0_never() -> None:
    pool = PagePool(5)
    assert pool.available == 5
    pages = []
    for left in (4, 3, 2, 1, 0):
        pages.append(pool.take(1))
        assert pool.available == left
    assert sorted(pages) == [(1,), (2,), (3,), (4,), (5,)]
    with pytest.raises(RuntimeError, match="too few of 5 pages are available"):
        pool.take(1)
    pool.release(pages[2:4])
    assert pool.available == 2
    assert {pool.take(1), pool.take(1)} == set(pages[2:4])


def test_page_is_available_after_its_last_user_releases_it() -> None:
    pool = PagePool(3)
    page = pool.take(1)
    pool.hold([page])
    pool.hold([page])
    for available in (2, 2, 3):
        pool.release([page])
        assert pool.available == available


def test_known_page_can_be_taken_only_without_users() -> None:
    pool = PagePool(2)
    pages = _read(pool, [A, B])
    pool.hold(pages)
    pool.release(pages)
    with pytest.raises(RuntimeError, match="available"):
        pool.take(1)
    pool.release(pages)
    assert {pool.take(1), pool.take(1)} == set(pages)


def test_shared_pages_that_are_idle_become_firm() -> None:
    pool = PagePool(6)
    short, long = _read(pool, [A]), _read(pool, [A, B, C])
    assert pool.newly_firm(long) == 0 and pool.available == 3 and pool.firm_pages == 3
    pool.release(long)
    assert pool.newly_firm(long) == 2 and pool.available == 5, "the first page is still the other's"
    pool.hold(long)
    assert pool.newly_firm(long) == 0 and pool.available == 3 and pool.firm_pages == 3
    pool.release(long)
    pool.release(short)
    assert pool.newly_firm(long) == 3 and pool.available == 6 and pool.firm_pages == 0


def test_passing_users_count_once_they_settle() -> None:
    pool = PagePool(6)
    first = pool.take(2, firm=False)
    second = pool.take(2)
    assert pool.available == 2 and pool.firm_pages == 2
    pool.hold([second], firm=False)
    pool.settle([first, second])
    assert pool.available == 2 and pool.firm_pages == 4
    pool.release([first, second])
    assert pool.available == 4 and pool.firm_pages == 2, "its first user still holds the second"
    pool.release([second])
    assert pool.available == 6 and pool.firm_pages == 0


# ---------------------------------------------------------------------------------------- Prefixes


def test_find_returns_the_longest_known_prefix() -> None:
    pool = PagePool(9)
    assert _find(pool, [A, B]) == []
    pages = _read(pool, [A, B, C])
    assert _find(pool, [A, B, C]) == pages
    assert _find(pool, [A, B, C, D]) == pages
    assert _find(pool, [A, B, D]) == pages[:2]
    assert _find(pool, [A]) == pages[:1]
    assert _find(pool, [A, D, C]) == pages[:1]
    assert _find(pool, [B, C]) == _find(pool, [D]) == _find(pool, []) == []


def test_find_adds_no_users() -> None:
    pool = PagePool(2)
    pages = _read(pool, [A, B])
    _find(pool, [A, B])
    pool.release(pages)
    assert pool.available == 2


def test_equal_blocks_after_different_blocks_get_different_pages() -> None:
    pool = PagePool(9)
    first, second, third = _read(pool, [A, C]), _read(pool, [B, C]), _read(pool, [C, C])
    assert len({*first, *second, *third}) == 6
    assert _find(pool, [A, C]) == first
    assert _find(pool, [B, C]) == second
    assert _find(pool, [C, C]) == third
    assert _find(pool, [A, C, C]) == first


def test_prompts_share_the_pages_of_their_common_prefix() -> None:
    pool = PagePool(9)
    first, second = _read(pool, [A, B, C]), _read(pool, [A, B, D])
    assert second[:2] == first[:2] and second[2] != first[2]
    assert pool.available == 5
    pool.release(first)
    assert pool.available == 6, "only its own page is idle"
    assert _find(pool, [A, B, D]) == second


def test_second_page_of_a_known_block_is_not_indexed() -> None:
    """The last page of a prompt is prefilled again: the known page stays in the index."""
    pool = PagePool(4)
    first = _read(pool, [A, B])
    second = _read(pool, [A, B], max_shared=1)
    assert second[0] == first[0] and second[1] != first[1]
    assert _find(pool, [A, B]) == first
    pool.release(second)
    assert _find(pool, [A, B]) == first
    assert pool.take(1) == second[1], "free, not idle: nothing is known of it"
    pool.release(first)
    assert _find(pool, [A, B]) == first


def test_unnamed_page_is_free_once_released() -> None:
    pool = PagePool(3)
    named = _read(pool, [A])
    pool.release(named)
    unnamed = [pool.take(1), pool.take(1)]
    pool.release(unnamed)
    assert {pool.take(1), pool.take(1)} == set(unnamed)
    assert _find(pool, [A]) == named, "free pages are taken before idle ones"


# ----------------------------------------------------------------------------------------- Eviction


def test_idle_pages_can_still_be_found() -> None:
    pool = PagePool(4)
    pages = _read(pool, [A, B])
    pool.release(pages)
    assert pool.available == 4
    assert _find(pool, [A, B]) == pages
    assert _read(pool, [A, B]) == pages
    assert pool.available == 2


def test_least_recently_used_page_is_evicted_first() -> None:
    pool = PagePool(3)
    pages = {block: _read(pool, [block]) for block in (A, B, C)}
    for block in (B, A, C):
        pool.release(pages[block])
    _read(pool, [B])
    pool.release(pages[B])  # used again: no longer the oldest
    for forgotten in (A, C, B):
        assert _find(pool, [forgotten]) == pages[forgotten]
        assert pool.take(1) == pages[forgotten][0]
        assert _find(pool, [forgotten]) == []


def test_end_of_a_prompt_is_evicted_before_its_beginning() -> None:
    pool = PagePool(3)
    pages = _read(pool, [A, B, C])
    pool.release(pages)
    for left in (2, 1, 0):
        assert pool.take(1) == pages[left]
        assert _find(pool, [A, B, C]) == pages[:left]


def test_reused_page_does_not_keep_its_old_children() -> None:
    """The children do not follow the new content of the page."""
    pool, (of_a, of_b) = PagePool(4), [(0, digest) for digest in block_digests([A, B])]
    (of_c,) = [(0, digest) for digest in block_digests([C])]
    old = pool.take(1)
    pool.name(old, of_a)
    child = pool.take(1)
    pool.name(child, of_b)
    pool.release([old])  # before its child, which no caller would do
    fillers = [pool.take(1), pool.take(1)]
    assert pool.take(1) == old
    assert _find(pool, [A, B]) == []
    pool.name(old, of_c)
    assert _find(pool, [C, B]) == [old]
    pool.release(fillers)
    new_page = pool.take(1)
    pool.name(new_page, of_a)
    assert _find(pool, [A, B]) == [new_page, child], "the same tokens again"


# ------------------------------------------------------------------------------------------ Bundles


def test_bundles_have_a_page_for_each_group() -> None:
    pool = PagePool(7)
    first, second = pool.take(3), pool.take(3)
    assert sorted([*first, *second]) == [1, 2, 3, 4, 5, 6] and pool.available == 1
    with pytest.raises(RuntimeError, match="too few of 7 pages are available"):
        pool.take(2)
    pool.release([first])
    assert pool.available == 4 and pool.take(1) in ((n,) for n in (*first, 7))


def test_bundles_are_evicted_whole_and_serve_bundles_of_other_sizes() -> None:
    pool = PagePool(6)
    bundles = _read(pool, [A, B], groups=3)
    pool.release(bundles)
    assert pool.available == 6
    assert {*pool.take(2)} < {*bundles[1]}, "the end of the prompt"
    assert _find(pool, [A, B]) == bundles[:1] and pool.available == 4
    pool.take(1)
    assert _find(pool, [A, B]) == bundles[:1] and pool.available == 3
    assert pool.take(2) and pool.available == 1
    assert _find(pool, [A, B]) == []


# ------------------------------------------------------------------------------------- Random walk


def _walk(seed: int, size: int, last_again: bool, steps: int = 400) -> list[list[Bundle]]:
    """Run random prompts and answers, and compare the pool with a model of users and content.

    Returns the pages that were taken for each prompt or answer. With last_again, the last block of
    a prompt is prefilled again even if it is known, as the sampler does.
    """
    rng, pool = np.random.default_rng(seed), PagePool(size)
    content: dict[Bundle, tuple[bytes, ...]] = {}  # for each page, the blocks up to it
    prompts: list[tuple[tuple[bytes, ...], list[Bundle]]] = []
    answers: list[Bundle] = []
    history = []
    for _ in range(steps):
        action = rng.choice(["read", "draw", "end", "forget"], p=[0.4, 0.2, 0.3, 0.1])
        if action == "read":
            blocks = tuple(rng.choice([A, B, C], size=rng.integers(1, 6)).tolist())
            if len(blocks) > pool.available:
                continue
            shared = _find(pool, blocks[:-1] if last_again else blocks)
            idle = pool.newly_firm(shared)
            assert idle == sum(
                page not in answers and not any(page in pages for _, pages in prompts)
                for page in shared
            )
            available = pool.available
            pages = _read(pool, list(blocks), len(shared))
            assert pages[: len(shared)] == shared
            assert pool.available == available - idle - len(pages) + len(shared)
            content |= {page: blocks[: i + 1] for i, page in enumerate(pages)}
            prompts.append((blocks, pages))
            history.append(pages)
        elif action == "draw" and pool.available:
            page = pool.take(1)
            content.pop(page, None)
            answers.append(page)
            history.append([page])
        elif action == "end" and prompts:
            _, pages = prompts.pop(rng.integers(len(prompts)))
            pool.release(pages)
        elif action == "forget" and answers:
            pool.release([answers.pop(rng.integers(len(answers)))])
        # The pool against the model.
        users = Counter(itertools.chain(answers, *(pages for _, pages in prompts)))
        assert pool._users == users and pool.firm_pages == len(users)
        unused_pages = [(page,) for page in pool._free] + [*pool._idle]
        assert sorted([*users, *unused_pages]) == [(page,) for page in range(1, size + 1)]
        assert pool.available == size - len(users)
        assert all(users[page] == 1 for page in answers)
        random_chain = tuple(rng.choice([A, B, C], size=5).tolist())
        for chain in (random_chain, *(blocks for blocks, _ in prompts)):
            chain_pages = _find(pool, chain)
            assert [content.get(page) for page in chain_pages] == [
                chain[: i + 1] for i in range(len(chain_pages))
            ]
            if not last_again and chain is not random_chain:
                assert len(chain_pages) == len(chain), "what is used is known"
    return history


@pytest.mark.parametrize("last_again", [False, True])
@pytest.mark.parametrize("size", [6, 12, 60])
def test_random_workload_matches_a_reference_model(size: int, last_again: bool) -> None:
    for seed in range(4):
        history = _walk(seed, size, last_again)
        assert len(history) > 30
        assert history == _walk(seed, size, last_again), "the same calls give the same pages"
