"""Which pages of the pool belong to whom, and which of them are known to hold what.

1. Pages are counted by users. A page that nobody uses is free, or idle: it still holds a block of
   some prompt, and is forgotten when no free page is left, the longest unused first.
2. A block of a prompt is known by its C tokens and the page of the block before it, a prefix tree:
   prompts that begin alike share the pages of all their blocks that are alike.
3. Nothing here touches a device. The same calls in the same order give the same pages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

# A block: the serial number of the page before it, and its tokens as bytes.
_Block = tuple[int, bytes]
_ROOT = 0


class Pool:
    """Pages 1 to `size`; page 0 is nobody's."""

    def __init__(self, size: int):
        self.size = size
        self._free = list(range(size, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._users = [0] * (size + 1)
        self._known: dict[_Block, int] = {}
        self._block: dict[int, _Block] = {}
        # A page's content by number: pages are used again, numbers are not.
        self._serial = [_ROOT] * (size + 1)
        self._next_serial = _ROOT + 1

    @property
    def available(self) -> int:
        """Pages that may be taken."""
        return len(self._free) + len(self._idle)

    def find(self, blocks: Sequence[bytes]) -> list[int]:
        """Pages of the longest known beginning of a prompt's blocks."""
        pages, parent = [], _ROOT
        for block in blocks:
            page = self._known.get((parent, block))
            if page is None:
                break
            pages.append(page)
            parent = self._serial[page]
        return pages

    def idle(self, pages: Sequence[int]) -> int:
        """How many of these pages nobody uses: holding them makes as many fewer available."""
        return sum(self._users[page] == 0 for page in pages)

    def hold(self, pages: Sequence[int]) -> None:
        """One more user of each page."""
        for page in pages:
            if not self._users[page]:
                del self._idle[page]
            self._users[page] += 1

    def take(self) -> int:
        """A page for one user, whose content is new.

        Raises:
          RuntimeError: none is available, which the caller should have known.
        """
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            del self._known[self._block.pop(page)]
        else:
            raise RuntimeError(f"no page of {self.size} is available")
        self._users[page] = 1
        self._serial[page] = self._next_serial
        self._next_serial += 1
        return page

    def name(self, page: int, parent: int | None, block: bytes) -> None:
        """Makes a taken page known as what follows a parent page (None: the beginning).

        The same block on another page stays the known one.
        """
        key = (_ROOT if parent is None else self._serial[parent], block)
        if key not in self._known:
            self._known[key] = page
            self._block[page] = key

    def release(self, pages: Sequence[int]) -> None:
        """One user less of each page, given in the order of their positions."""
        for page in reversed(pages):  # of a prompt its end is forgotten first
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._block:
                self._idle[page] = None
            else:
                self._free.append(page)
