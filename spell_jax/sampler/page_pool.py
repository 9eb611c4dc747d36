"""Pool of KV cache pages, with a prefix tree over their contents.

1. Pages have reference counts. A page without users is free, or idle if it still holds a prompt
   block. If no page is free, the least recently used idle page is evicted.
2. A prompt block is identified by its C tokens and the page of the previous block (a prefix tree).
   Prompts with a common prefix share the pages of all its whole blocks.
3. Nothing here touches a device. The same calls in the same order give the same pages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

# A block: the serial number of the previous page, and the block's tokens as bytes.
_Block = tuple[int, bytes]
_ROOT = 0


class PagePool:
    """Pages 1 to `size`, with reference counts. Page 0 is scratch and belongs to no prompt."""

    def __init__(self, size: int):
        self.size = size
        # In descending order, so that pop() takes the lowest page at O(1).
        self._free = list(range(size, 0, -1))
        # In the order of release: the first page is the least recently used.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._users = [0] * (size + 1)
        self._known: dict[_Block, int] = {}
        self._block: dict[int, _Block] = {}
        # Serial number of each page's content. A block names its parent by serial number, because
        # an evicted parent's page is reused, while its children may still be in the pool.
        self._serial = [_ROOT] * (size + 1)
        self._next_serial = _ROOT + 1

    @property
    def available(self) -> int:
        return len(self._free) + len(self._idle)

    def find(self, blocks: Sequence[bytes]) -> list[int]:
        """Return the pages of a prompt's longest prefix of blocks that are in the pool."""
        pages, parent = [], _ROOT
        for block in blocks:
            if (page := self._known.get((parent, block))) is None:
                break
            pages.append(page)
            parent = self._serial[page]
        return pages

    def idle(self, pages: Sequence[int]) -> int:
        """Count the pages without users. Holding the pages lowers `available` by this count."""
        return sum(self._users[page] == 0 for page in pages)

    def hold(self, pages: Sequence[int]) -> None:
        for page in pages:
            if not self._users[page]:
                del self._idle[page]
            self._users[page] += 1

    def take(self) -> int:
        """Take a page for one user and forget its old content; callers check `available`."""
        # Empty pages first, because an idle page may serve another prompt.
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
        """Register a page as the block after a parent page (None: the first block).

        A block that another page already holds stays registered there.
        """
        key = (_ROOT if parent is None else self._serial[parent], block)
        if key not in self._known:
            self._known[key] = page
            self._block[page] = key

    def release(self, pages: Sequence[int]) -> None:
        """Decrement the user count of each page. `pages` are in prompt order."""
        # In reverse, so that the end of a prompt is evicted before its beginning: a block without
        # its parent cannot be found.
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._block:
                self._idle[page] = None
            else:
                self._free.append(page)
