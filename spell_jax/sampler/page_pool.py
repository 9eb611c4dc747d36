"""Pool of KV cache pages, with an index of the prompt blocks that they hold.

1. A block is C tokens. A bundle holds a block in all page groups of a kind (page_groups.py), with
   one page for each group. Without windows there is one group, and a bundle is a page.
2. Bundles have reference counts. A bundle without users is free, or idle if it still holds a prompt
   block. If too few pages are free, the least recently used idle bundles are evicted.
3. A prompt block is identified by a digest of the prompt up to its end, so prompts with a common
   prefix share all of its whole blocks.
4. Users are firm or passing. Passing users are prompts that are being prefilled: their bundles in
   layers with a window move on with them. The scheduler reserves pages for passing users as a
   whole, and counts firm pages one by one.
5. Nothing here touches a device. The same calls in the same order give the same pages.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

Bundle = tuple[int, ...]  # pages of a block in the groups of a kind, in order of the groups
Key = tuple[int, bytes]  # number of the kind, and digest of a block


def block_digests(blocks: Iterable[bytes]) -> list[bytes]:
    """Return the digest of each block of a prompt, which depends on all blocks before it."""
    digests, digest = [], b""
    for block in blocks:
        digest = hashlib.sha256(digest + block).digest()
        digests.append(digest)
    return digests


class PagePool:
    """Pages 1 to `size`, in bundles with reference counts. Page 0 is scratch."""

    def __init__(self, size: int):
        self.size = size
        self.firm_pages = 0  # number of pages with a firm user
        # In descending order, so that pop() takes the lowest page at O(1).
        self._free = list(range(size, 0, -1))
        # In the order of release: the first bundle is the least recently used.
        self._idle: OrderedDict[Bundle, None] = OrderedDict()
        self._idle_pages = 0
        self._users: Counter[Bundle] = Counter()
        self._firm_users: Counter[Bundle] = Counter()
        self._known: dict[Key, Bundle] = {}
        self._key: dict[Bundle, Key] = {}

    @property
    def available(self) -> int:
        """Number of pages without a user."""
        return len(self._free) + self._idle_pages

    def find(self, key: Key) -> Bundle | None:
        """Return the bundle that holds a prompt block, None if there is none."""
        return self._known.get(key)

    def newly_firm(self, bundles: Sequence[Bundle]) -> int:
        """Count the pages without a firm user, by which `hold` would raise `firm_pages`."""
        return sum(len(bundle) for bundle in bundles if bundle not in self._firm_users)

    def hold(self, bundles: Iterable[Bundle], firm: bool = True) -> None:
        """Add a user to each bundle."""
        for bundle in bundles:
            if bundle in self._idle:
                del self._idle[bundle]
                self._idle_pages -= len(bundle)
            self._users[bundle] += 1
            if firm:
                self._add_firm(bundle)

    def settle(self, bundles: Iterable[Bundle]) -> None:
        """Make a passing user of each bundle firm."""
        for bundle in bundles:
            self._add_firm(bundle)

    def take(self, pages: int, firm: bool = True) -> Bundle:
        """Take a bundle of pages for one user; callers check that there are enough."""
        # Free pages first, because an idle bundle may serve another prompt.
        while len(self._free) < pages and self._idle:
            bundle, _ = self._idle.popitem(last=False)
            self._idle_pages -= len(bundle)
            del self._known[self._key.pop(bundle)]
            self._free.extend(reversed(bundle))
        if len(self._free) < pages:
            raise RuntimeError(f"too few of {self.size} pages are available")
        bundle = tuple(self._free.pop() for _ in range(pages))
        self._users[bundle] = 1
        if firm:
            self._add_firm(bundle)
        return bundle

    def name(self, bundle: Bundle, key: Key) -> None:
        """Register the prompt block that a bundle holds.

        A block that another bundle already holds stays registered there.
        """
        if key not in self._known:
            self._known[key] = bundle
            self._key[bundle] = key

    def release(self, bundles: Sequence[Bundle], firm: bool = True) -> None:
        """Remove a user from each bundle. `bundles` are in prompt order."""
        # In reverse, so that the end of a prompt is evicted before its beginning: without its
        # beginning, no block of a prompt is of use.
        for bundle in reversed(bundles):
            if firm:
                self._remove_firm(bundle)
            self._users[bundle] -= 1
            if self._users[bundle]:
                continue
            del self._users[bundle]
            if bundle in self._key:
                self._idle[bundle] = None
                self._idle_pages += len(bundle)
            else:
                self._free.extend(reversed(bundle))

    def _add_firm(self, bundle: Bundle) -> None:
        if bundle not in self._firm_users:
            self.firm_pages += len(bundle)
        self._firm_users[bundle] += 1

    def _remove_firm(self, bundle: Bundle) -> None:
        self._firm_users[bundle] -= 1
        if not self._firm_users[bundle]:
            del self._firm_users[bundle]
            self.firm_pages -= len(bundle)
