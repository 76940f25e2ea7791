"""Lists in pages: whole, in order, each page well below a frame, whatever comes or goes between."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chv.common import pages
from chv.common.rpc import FRAME_BYTES_MAX, Method
from chv.common.wire.types import ListPage, PageReply

KEYS = st.sets(st.text("abz-0 ", min_size=1, max_size=6), max_size=40)


class Words(PageReply, frozen=True, kw_only=True):
    """What is listed."""

    words: list[str] = []
    sizes: list[int] = []


LIST_WORDS = Method("ListWords", ListPage, Words, mutating=False)


class Lister:
    """Serves keys, each as an item of `width` characters more."""

    def __init__(self, keys: set[str], width: int) -> None:
        self.keys = keys
        self.width = width
        self.pages: list[int] = []

    def call(self, _method: Any, request: ListPage) -> Words:
        """Return one page."""
        keyed = ((key, key + "x" * self.width) for key in sorted(self.keys))
        words, after = pages.page(keyed, request.after)
        self.pages.append(sum(map(len, words)))
        return Words(words=words, sizes=[len(word) for word in words], next=after)

    async def call_later(self, method: Any, request: ListPage) -> Words:
        """Return one page."""
        return self.call(method, request)


@given(KEYS, st.sampled_from([0, 1000, pages.PAGE_BYTES_MAX // 3, pages.PAGE_BYTES_MAX]))
def test_pages_together_are_the_whole_list_in_order(keys: set[str], width: int) -> None:
    lister = Lister(keys, width)
    reply = pages.whole_blocking(lister.call, LIST_WORDS, ListPage(), "words", "sizes")
    assert [word[: len(word) - width] for word in reply.words] == sorted(keys)
    assert reply.sizes == [len(word) for word in reply.words]
    assert reply.next == ""
    assert max(lister.pages) < FRAME_BYTES_MAX + 16


async def test_what_goes_between_two_pages_hides_nothing_else() -> None:
    lister = Lister({"a", "b", "c", "d"}, pages.PAGE_BYTES_MAX)
    first = await lister.call_later(LIST_WORDS, ListPage())
    assert [word[0] for word in first.words] == ["a"]
    lister.keys -= {"a", "b"}
    lister.keys |= {"aa"}
    rest = await pages.whole(lister.call_later, LIST_WORDS, ListPage(after=first.next), "words")
    assert [word.rstrip("x") for word in rest.words] == ["aa", "c", "d"]


@pytest.mark.parametrize("item", ["text", msgspec.Raw(b'"text"')])
def test_an_item_longer_than_a_page_is_a_page(item: Any) -> None:
    found, after = pages.page([("a", item)], "")
    assert (found, after) == ([item], "")
