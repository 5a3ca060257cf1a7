from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.core.pages.block_manager import BlockManager, PageChain, PageIdentity, pages_for
from tests.core_laws import check_pages
from tests.effort import drawn

SIZE = 4


def chain_of(tokens: list[int], salt: bytes = b"") -> list[PageIdentity]:
    return PageChain(salt, SIZE).extend(array("I", tokens), len(tokens) // SIZE)


def head_of(tokens: list[int]) -> PageIdentity:
    """The identity of the page or head in which these tokens end."""
    identity = PageChain(b"", SIZE).identity(array("I", tokens), len(tokens))
    assert identity is not None
    return identity


def filled(manager: BlockManager, tokens: list[int], salt: bytes = b"") -> list[int]:
    """The pages of a sequence that has computed these tokens."""
    pages = manager.allocate(pages_for(len(tokens), SIZE))
    for page, identity in zip(pages, chain_of(tokens, salt), strict=False):
        manager.register(page, identity)
    return pages


@pytest.mark.parametrize(("tokens_len", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_pages_for(tokens_len: int, pages: int) -> None:
    assert pages_for(tokens_len, 4) == pages


# -- identities -----------------------------------------------------------------------------------


def test_a_pages_identity_depends_on_every_token_before_it() -> None:
    base = chain_of(list(range(12)))
    changed = chain_of([99, *range(1, 12)])
    assert all(a != b for a, b in zip(base, changed, strict=True))
    assert chain_of([*range(8), 99, 9, 10, 11])[:2] == base[:2]


def test_equal_tokens_at_another_position_have_another_identity() -> None:
    first, second = chain_of([1, 2, 3, 4, 1, 2, 3, 4])
    assert first != second


def test_token_ids_do_not_run_into_each_other() -> None:
    assert chain_of([1, 0, 0, 0]) != chain_of([256, 0, 0, 0]) != chain_of([0, 1, 0, 0])


def test_salts_separate_equal_prompts() -> None:
    tokens = list(range(8))
    assert not set(chain_of(tokens, b"tenant a")) & set(chain_of(tokens, b"tenant b"))
    manager = BlockManager(4, SIZE)
    manager.release(filled(manager, tokens, b"tenant a"))
    assert manager.match(chain_of(tokens, b"tenant b")) == []
    assert len(manager.match(chain_of(tokens, b"tenant a"))) == 2


def test_chain_hashes_each_page_once_and_grows_with_its_tokens() -> None:
    tokens = array("I", range(8))
    chain = PageChain(b"", SIZE)
    first = chain.extend(tokens, 1)[0]
    tokens.extend(range(8, 13))
    grown = chain.extend(tokens, 3)
    assert grown[0] is first
    assert grown == chain_of(list(range(12)))
    with pytest.raises(AssertionError):
        chain.extend(tokens, 4)


# -- pages ----------------------------------------------------------------------------------------


def test_match_finds_the_longest_known_prefix() -> None:
    manager = BlockManager(8, SIZE)
    pages = filled(manager, list(range(12)))
    assert manager.match(chain_of([*range(8), 99, 99, 99, 99])) == pages[:2]
    assert manager.match(chain_of([99, *range(1, 12)])) == []


def test_the_tail_of_a_prefix_is_evicted_before_its_parents() -> None:
    manager = BlockManager(3, SIZE)
    pages = filled(manager, list(range(12)))
    manager.release(pages)
    assert manager.allocate(1) == [pages[2]]
    assert manager.match(chain_of(list(range(12)))) == pages[:2]


def test_least_recently_used_prefix_is_evicted_first() -> None:
    manager = BlockManager(2, SIZE)
    old, young = filled(manager, [1] * 4), filled(manager, [2] * 4)
    manager.release(old)
    manager.release(young)
    manager.acquire(old)
    manager.release(old)  # used again
    assert manager.allocate(1) == young


def test_free_pages_go_before_cached_ones() -> None:
    manager = BlockManager(3, SIZE)
    manager.release(filled(manager, [1] * 4))
    manager.allocate(2)
    assert manager.cached == 1
    assert len(manager.match(chain_of([1] * 4))) == 1


def test_of_two_pages_of_one_prefix_the_first_is_found_and_the_second_is_free_at_its_end() -> None:
    manager = BlockManager(4, SIZE)
    first, second = filled(manager, [1] * 4), manager.allocate(1)
    manager.register(second[0], chain_of([1] * 4)[0])
    assert manager.match(chain_of([1] * 4)) == first
    manager.release(second)
    assert (manager.free, manager.cached) == (3, 0)
    manager.release(first)
    assert (manager.free, manager.cached) == (3, 1)
    check_pages(manager, [])


@pytest.mark.parametrize("is_spared_before", [False, True])
def test_a_page_whose_head_another_took_is_free_and_is_not_spared(is_spared_before: bool) -> None:
    """As when a sequence is preempted that has the head which another is to be forked from."""
    manager = BlockManager(3, SIZE)
    source, owner = manager.allocate(1), manager.allocate(1)
    manager.register_head(source[0], head_of([1]))
    manager.release(source)
    if is_spared_before:
        manager.spare(source[0])
    manager.register_head(owner[0], head_of([1]))
    manager.spare(source[0])
    assert (manager.free, manager.cached) == (2, 0)
    check_pages(manager, [owner])


def test_counts_of_pages_that_acquire_and_release_would_change() -> None:
    manager = BlockManager(4, SIZE)
    pages = filled(manager, list(range(8)))
    assert (manager.unshared(pages), manager.unreferenced(pages)) == (2, 0)
    manager.acquire(pages[:1])
    assert manager.unshared(pages) == 1
    manager.release(pages)
    assert manager.unreferenced(pages) == 1
    check_pages(manager, [pages[:1]])


def test_forgotten_pages_are_not_matched_and_become_free() -> None:
    manager = BlockManager(4, SIZE)
    pages = filled(manager, list(range(8)))
    manager.forget(pages)
    assert manager.match(chain_of(list(range(8)))) == []
    manager.release(pages)
    assert (manager.free, manager.cached) == (4, 0)
    check_pages(manager, [])


def test_programmer_errors_assert() -> None:
    manager = BlockManager(2, SIZE)
    pages = manager.allocate(2)
    with pytest.raises(AssertionError):
        manager.allocate(1)
    with pytest.raises(AssertionError):
        manager.acquire(pages)  # without identity, not shareable
    manager.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        manager.release(pages[:1])


@pytest.mark.parametrize("tables", [[], [[0], [0]], [[1]], [[0, 0]]])
def test_check_finds_wrong_page_tables(tables: list[list[int]]) -> None:
    manager = BlockManager(2, SIZE)
    assert manager.allocate(1) == [0]
    check_pages(manager, [[0]])
    with pytest.raises(AssertionError):
        check_pages(manager, tables)


def test_a_head_is_found_while_its_page_is_owned_or_cached_and_goes_with_it() -> None:
    manager = BlockManager(2, SIZE)
    head, longer = head_of(list(range(5))), head_of(list(range(6)))
    pages = filled(manager, list(range(4))) + manager.allocate(1)
    manager.register_head(pages[1], head)
    manager.register_head(pages[1], longer)
    assert [manager.find(head), manager.find(longer)] == [pages[1]] * 2
    manager.release(pages)
    assert (manager.free, manager.cached) == (0, 2)
    assert manager.find(head) == pages[1]
    manager.spare(pages[1])
    assert manager.allocate(1) == pages[:1], "the other one, though it is of more use"
    assert manager.allocate(1) == pages[1:]
    assert manager.find(head) is manager.find(longer) is None
    check_pages(manager, [pages[:1], pages[1:]])


def test_heads_take_no_room_from_full_pages() -> None:
    manager = BlockManager(4, SIZE)
    full = filled(manager, list(range(8)))
    manager.release(full)
    for first in (7, 9):
        (page,) = manager.allocate(1)
        manager.register_head(page, head_of([first]))
        manager.release([page])
    assert (manager.free, manager.cached) == (0, 4)
    taken = manager.allocate(2)
    assert manager.match(chain_of(list(range(8)))) == full
    assert manager.find(head_of([7])) is manager.find(head_of([9])) is None
    check_pages(manager, [taken])


def test_a_head_moves_from_a_cached_page_to_one_that_is_owned_and_not_on() -> None:
    manager = BlockManager(4, SIZE)
    first, second, third = ([page] for page in manager.allocate(3))
    for page in (first, second):
        manager.register_head(page[0], head_of([5]))
    assert manager.find(head_of([5])) == first[0]
    manager.release(first)
    manager.register_head(third[0], head_of([5]))
    assert manager.find(head_of([5])) == third[0]
    assert (manager.free, manager.cached) == (2, 0), "nothing else finds the first"
    check_pages(manager, [second, third])


def test_the_end_of_a_prompt_is_named_by_all_that_is_before_it() -> None:
    tokens, others = array("I", range(9)), array("I", [7, *range(1, 9)])
    plain, salted, other = PageChain(b"", SIZE), PageChain(b"salt", SIZE), PageChain(b"", SIZE)
    assert plain.identity(tokens, 0) is None
    assert plain.identity(tokens, 8) == chain_of(list(range(8)))[1], "a full page"
    names = [plain.identity(tokens, end) for end in range(1, 10)]
    names += [salted.identity(tokens, end) for end in range(1, 10)]
    names += [other.identity(others, end) for end in range(1, 10)]
    assert len(set(names)) == 27
    assert plain.identity(tokens, 7) == PageChain(b"", SIZE).identity(array("I", range(7)), 7)


class Pool(RuleBasedStateMachine):
    """Sequences come, fill pages, grow, are forgotten and go, in any order. No page is lost or in two states
    at any time, and a prefix that is found is the one that was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(6, SIZE)
        self.tables: list[list[int]] = []
        self.holds: dict[int, list[int]] = {}
        """All tokens up to the end of a page as last written, by page."""

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=16))
    def come(self, tokens: list[int]) -> None:
        hits = self.manager.match(chain_of(tokens))
        for index, page in enumerate(hits):
            assert self.holds[page] == tokens[: (index + 1) * SIZE]
        fresh = pages_for(len(tokens), SIZE) - len(hits)
        if fresh + self.manager.unreferenced(hits) > self.manager.available:
            return
        before = self.manager.available
        takes = fresh + self.manager.unreferenced(hits)
        self.manager.acquire(hits)
        table = hits + self.manager.allocate(fresh)
        assert self.manager.available == before - takes
        for index, identity in enumerate(chain_of(tokens)):
            if index >= len(hits):
                self.holds[table[index]] = tokens[: (index + 1) * SIZE]
                self.manager.register(table[index], identity)
        if len(tokens) % SIZE:
            self.holds[table[-1]] = tokens
            self.manager.register_head(table[-1], head_of(tokens))
        self.tables.append(table)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=16))
    def find(self, tokens: list[int]) -> None:
        page = self.manager.find(head_of(tokens))
        assert page is None or self.holds[page] == tokens
        if page is not None:
            self.manager.spare(page)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        before, freed = self.manager.available, self.manager.unshared(table)
        self.manager.release(table)
        assert self.manager.available == before + freed

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        self.manager.forget(self.tables[data.draw(st.integers(0, len(self.tables) - 1))])

    @invariant()
    def law_1(self) -> None:
        check_pages(self.manager, self.tables)
        assert self.manager.free + self.manager.cached + self.manager.owned == self.manager.total


Pool.TestCase.settings = settings(max_examples=drawn(20, whole=60), stateful_step_count=30, deadline=None)
TestPool = Pool.TestCase


@given(
    prompt=st.lists(st.integers(0, 9), max_size=20),
    ends=st.lists(st.integers(0, 30), min_size=1, max_size=6),
)
def test_a_branch_has_the_identities_of_a_chain_of_its_own(prompt: list[int], ends: list[int]) -> None:
    trunk = PageChain(b"salt", SIZE)
    for own in range(3):
        tokens = array("I", [*prompt, *[own] * 30])
        plain, branch = PageChain(b"salt", SIZE), trunk.branch(len(prompt))
        for end in ends:
            assert branch.identity(tokens, end) == plain.identity(tokens, end)
            assert branch.extend(tokens, end // SIZE) == plain.extend(tokens, end // SIZE)
            assert branch.identities == plain.identities
        assert len(trunk.identities) <= len(prompt) // SIZE, "no output is part of the trunk"
