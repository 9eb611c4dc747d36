"""Tests of the page pool: reference counts, known prefixes, order of eviction."""

import numpy as np
import pytest

from spell_jax.sampler.page_pool import PagePool

A, B, C, D, E = b"a", b"b", b"c", b"d", b"e"


def _read(pool: PagePool, blocks: list[bytes], max_shared: int | None = None) -> list[int]:
    """Take the pages of a prompt: known pages are shared, other pages are new.

    Args:
      max_shared: maximum number of known pages to share.
    """
    shared = pool.find(blocks[:max_shared])
    pool.hold(shared)
    pages = list(shared)
    for block in blocks[len(shared) :]:
        page = pool.take()
        pool.name(page, pages[-1] if pages else None, block)
        pages.append(page)
    return pages


# ------------------------------------------------------------------------------------------- Users


def test_each_page_is_taken_once_and_page_0_never() -> None:
    pool = PagePool(5)
    assert pool.available == 5
    pages = []
    for left in (4, 3, 2, 1, 0):
        pages.append(pool.take())
        assert pool.available == left
    assert sorted(pages) == [1, 2, 3, 4, 5]
    with pytest.raises(RuntimeError, match="no page of 5 is available"):
        pool.take()
    pool.release(pages[2:4])
    assert pool.available == 2
    assert {pool.take(), pool.take()} == set(pages[2:4])


def test_page_is_available_after_its_last_user_releases_it() -> None:
    pool = PagePool(3)
    page = pool.take()
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
        pool.take()
    pool.release(pages)
    assert {pool.take(), pool.take()} == set(pages)


def test_idle_counts_pages_without_users() -> None:
    pool = PagePool(6)
    short, long = _read(pool, [A]), _read(pool, [A, B, C])
    assert pool.idle(long) == 0 and pool.available == 3
    pool.release(long)
    assert pool.idle(long) == 2 and pool.available == 5, "the first page is still the other's"
    pool.hold(long)
    assert pool.idle(long) == 0 and pool.available == 3
    pool.release(long)
    pool.release(short)
    assert pool.idle(long) == 3 and pool.available == 6


# ---------------------------------------------------------------------------------------- Prefixes


def test_find_returns_the_longest_known_prefix() -> None:
    pool = PagePool(9)
    assert pool.find([A, B]) == []
    pages = _read(pool, [A, B, C])
    assert pool.find([A, B, C]) == pages
    assert pool.find([A, B, C, D]) == pages
    assert pool.find([A, B, D]) == pages[:2]
    assert pool.find([A]) == pages[:1]
    assert pool.find([A, D, C]) == pages[:1]
    assert pool.find([B, C]) == pool.find([D]) == pool.find([]) == []


def test_find_adds_no_users() -> None:
    pool = PagePool(2)
    pages = _read(pool, [A, B])
    pool.find([A, B])
    pool.release(pages)
    assert pool.available == 2


def test_equal_blocks_with_different_parents_get_different_pages() -> None:
    pool = PagePool(9)
    first, second, third = _read(pool, [A, C]), _read(pool, [B, C]), _read(pool, [C, C])
    assert len({*first, *second, *third}) == 6
    assert pool.find([A, C]) == first
    assert pool.find([B, C]) == second
    assert pool.find([C, C]) == third
    assert pool.find([A, C, C]) == first


def test_prompts_share_the_pages_of_their_common_prefix() -> None:
    pool = PagePool(9)
    first, second = _read(pool, [A, B, C]), _read(pool, [A, B, D])
    assert second[:2] == first[:2] and second[2] != first[2]
    assert pool.available == 5
    pool.release(first)
    assert pool.available == 6, "only its own page is idle"
    assert pool.find([A, B, D]) == second


def test_second_page_of_a_known_block_is_not_indexed() -> None:
    """The last page of a prompt is prefilled again: the known page stays in the index."""
    pool = PagePool(4)
    first = _read(pool, [A, B])
    second = _read(pool, [A, B], max_shared=1)
    assert second[0] == first[0] and second[1] != first[1]
    assert pool.find([A, B]) == first
    pool.release(second)
    assert pool.find([A, B]) == first
    assert pool.take() == second[1], "free, not idle: nothing is known of it"
    pool.release(first)
    assert pool.find([A, B]) == first


def test_unnamed_page_is_free_once_released() -> None:
    pool = PagePool(3)
    named = _read(pool, [A])
    pool.release(named)
    unnamed = [pool.take(), pool.take()]
    pool.release(unnamed)
    assert {pool.take(), pool.take()} == set(unnamed)
    assert pool.find([A]) == named, "free pages are taken before idle ones"


# ----------------------------------------------------------------------------------------- Eviction


def test_idle_pages_can_still_be_found() -> None:
    pool = PagePool(4)
    pages = _read(pool, [A, B])
    pool.release(pages)
    assert pool.available == 4
    assert pool.find([A, B]) == pages
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
        assert pool.find([forgotten]) == pages[forgotten]
        assert pool.take() == pages[forgotten][0]
        assert pool.find([forgotten]) == []


def test_end_of_a_prompt_is_evicted_before_its_beginning() -> None:
    pool = PagePool(3)
    pages = _read(pool, [A, B, C])
    pool.release(pages)
    for left in (2, 1, 0):
        assert pool.take() == pages[left]
        assert pool.find([A, B, C]) == pages[:left]


def test_reused_page_does_not_keep_its_old_children() -> None:
    """The children are still in the pool, but no longer found.

    They follow neither the new content of the page, nor its old content in another page.
    """
    pool = PagePool(4)
    old = pool.take()
    pool.name(old, None, A)
    child = pool.take()
    pool.name(child, old, B)
    pool.release([old])  # before its child, which no caller would do
    fillers = [pool.take(), pool.take()]
    assert pool.take() == old
    assert pool.find([A, B]) == []
    pool.name(old, None, C)
    assert pool.find([C, B]) == [old]
    pool.release(fillers)
    new_page = pool.take()
    pool.name(new_page, None, A)
    assert pool.find([A, B]) == [new_page]
    pool.release([child])
    assert pool.find([A, B]) == [new_page]


def test_page_rewritten_with_same_content_has_no_old_children() -> None:
    pool = PagePool(2)
    pages = _read(pool, [A, B])
    pool.release(pages[:1])
    assert pool.take() == pages[0]
    pool.name(pages[0], None, A)
    assert pool.find([A, B]) == pages[:1]


# ------------------------------------------------------------------------------------- Random walk


def _walk(seed: int, size: int, last_again: bool, steps: int = 400) -> list[list[int]]:
    """Run random prompts and answers, and compare the pool with a model of users and content.

    Returns the pages that were taken for each prompt or answer. With last_again, the last block of
    a prompt is prefilled again even if it is known, as the sampler does.
    """
    rng, pool = np.random.default_rng(seed), PagePool(size)
    content: dict[int, tuple[bytes, ...]] = {}  # for each page, the blocks up to it
    prompts: list[tuple[tuple[bytes, ...], list[int]]] = []
    answers: list[int] = []
    history = []
    for _ in range(steps):
        action = rng.choice(["read", "draw", "end", "forget"], p=[0.4, 0.2, 0.3, 0.1])
        if action == "read":
            blocks = tuple(rng.choice([A, B, C], size=rng.integers(1, 6)).tolist())
            if len(blocks) > pool.available:
                continue
            shared = pool.find(blocks[:-1] if last_again else blocks)
            idle = pool.idle(shared)
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
            page = pool.take()
            content.pop(page, None)
            answers.append(page)
            history.append([page])
        elif action == "end" and prompts:
            _, pages = prompts.pop(rng.integers(len(prompts)))
            pool.release(pages)
        elif action == "forget" and answers:
            pool.release([answers.pop(rng.integers(len(answers)))])
        # The pool against the model.
        users = np.zeros(size + 1, int)
        for page in [*answers, *(page for _, pages in prompts for page in pages)]:
            users[page] += 1
        assert pool._users == users.tolist()
        used_pages = np.flatnonzero(users).tolist()
        assert sorted([*used_pages, *pool._free, *pool._idle]) == list(range(1, size + 1))
        assert pool.available == size - len(used_pages)
        assert max(users[answers], default=0) <= 1, "a page of an answer has one user"
        random_chain = tuple(rng.choice([A, B, C], size=5).tolist())
        for chain in (random_chain, *(blocks for blocks, _ in prompts)):
            chain_pages = pool.find(chain)
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
