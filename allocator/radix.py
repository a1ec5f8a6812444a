"""The trie of published blocks.

Path-compressed; an edge is a multiple of the block size and its tokens are int32 bytes, so that a walk costs
one dict lookup and one memcmp per node, whatever the number of tokens. Counts live on nodes, not on blocks.

Two invariants carry the rest. A held node's ancestors are held, so unheld nodes form whole subtrees and every
unheld block can be evicted leaf by leaf. An unheld node was used no later than its parent, so evicting the
oldest leaf first evicts the oldest block first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from allocator.errors import ArgumentError
from allocator.lease import BlockLease
from allocator.lru import EvictionQueue
from allocator.node import ID_BYTES, Node, count_common, new_root, salt_of
from allocator.pool import Pool


class Walk(NamedTuple):
    """How far a text is known below some node."""

    path: list[Node]
    """Nodes whose whole edge matches, top down."""
    branch: Node | None
    """The next node, of which only the first `n_branch` blocks match (at least one)."""
    n_branch: int


class RadixTrie:
    """Owns the nodes, the counts that follow from them and the order of eviction. Runs are int32 memoryviews
    of the request's text from position 0; positions are counted in blocks. Nothing here recurses."""

    __slots__ = (
        "_block_size",
        "_clock_s",
        "_next_uid",
        "_pool",
        "n_evictable",
        "n_evicted",
        "n_nodes",
        "n_shared",
        "now",
        "queue",
        "roots",
    )

    def __init__(self, pool: Pool, *, block_size: int, clock_s: Callable[[], float]) -> None:
        self._pool = pool
        self._block_size = block_size
        self._clock_s = clock_s
        self._next_uid = 0
        self.now = 0
        """Logical time: the number of releases so far."""
        self.roots: dict[str, Node] = {}
        self.queue = EvictionQueue()
        self.n_nodes = 0
        """Attached nodes, roots aside."""
        self.n_evictable = 0
        """Blocks of attached nodes that no lease holds."""
        self.n_shared = 0
        """Blocks of nodes that two leases or more hold."""
        self.n_evicted = 0
        """Blocks evicted so far."""

    # ---- looking ----

    def walk(self, node: Node, run: memoryview, n_blocks: int) -> Walk:
        """Follow `run` below `node` as far as position `n_blocks`."""
        size = self._block_size
        at = node.end * size
        stop = n_blocks * size
        path: list[Node] = []
        while at < stop:
            child = node.children.get(bytes(run[at : at + size]))
            if child is None:
                break
            end = child.end * size
            if end > stop or not child.edge.startswith(run[at:end]):
                return Walk(path, child, count_common(child.edge, run[at : min(end, stop)]) // size)
            path.append(child)
            node = child
            at = end
        return Walk(path, None, 0)

    def nodes(self) -> Iterator[Node]:
        """All attached nodes, parents first, roots aside."""
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # ---- holding ----

    def hold(self, salt: str, walk: Walk) -> Node:
        """Count one more lease on the walked path, which began at the salt's root; the deepest node of it."""
        root = self.roots.get(salt)
        if root is None:
            root = self.roots[salt] = new_root(self._uid(), salt)
        root.refs += 1
        path = walk.path
        if walk.branch is not None:
            path.append(self.split(walk.branch, walk.n_branch))
        for node in path:
            node.hits += 1
            refs = node.refs
            node.refs = refs + 1
            if refs == 0:
                self.n_evictable -= node.end - node.start
            elif refs == 1:
                self.n_shared += node.end - node.start
        return path[-1] if path else root

    def release(self, lease: BlockLease) -> None:
        """Take the lease's counts back; its private blocks become free, its published ones stay, unheld."""
        pool = self._pool
        node = lease.node
        assert node is not None
        leaf = node
        if lease.lost:
            self._release_lost(lease)
        elif lease.n_blocks > leaf.end:
            pool.give(lease.slice(leaf.end, lease.n_blocks))
        self.now = now = self.now + 1
        now_s = self._clock_s()
        while node.parent is not None:
            if node.twins is not None and lease in node.twins:
                self._leave(node, lease)
                pool.give(lease.slice(node.start, node.end))
            else:
                node.stamp = now
                node.used_s = now_s
                node.refs = refs = node.refs - 1
                if refs == 1:
                    self.n_shared -= node.end - node.start
                elif refs == 0:
                    if node.twins is None:
                        self.n_evictable += node.end - node.start
                    else:
                        self._adopt(node, node.twins[0])
            node = node.parent
        node.refs -= 1
        self._settle(node)
        if leaf is not node:
            self._settle(leaf)

    def _release_lost(self, lease: BlockLease) -> None:
        """Free what lies below the lease's deepest attached node, as far as no other lease holds it."""
        node = lease.node
        assert node is not None
        start = node.end
        private = np.ones(lease.n_blocks - start, dtype=np.bool_)
        for node in lease.lost:
            private[node.start - start : node.end - start] = False
            node.refs -= 1
            if node.refs == 1:
                self.n_shared -= node.end - node.start
            elif node.refs == 0:
                self._pool.give(node.block_ids())
        self._pool.give(lease.slice(start, lease.n_blocks)[private])

    # ---- publishing ----

    def publish(self, lease: BlockLease, run: memoryview, n_blocks: int) -> None:
        """Put the lease's blocks up to position `n_blocks` into the trie where the text is not there yet.
        Raises ArgumentError when the lease's last published block holds another text."""
        tip = lease.node
        assert tip is not None
        size = self._block_size
        if tip.edge and not tip.edge.endswith(run[(tip.end - 1) * size : tip.end * size]):
            raise ArgumentError(
                f"the text does not go on from the {tip.end} blocks that the lease has published"
            )
        if not (tip.refs == 1 and not tip.children and tip.parent is not None):
            walk = self.walk(tip, run, n_blocks)
            path, branch, n_branch = walk
            n_known = (path[-1].end if path else tip.end) + n_branch
            if n_known == n_blocks:
                return
            if branch is not None:
                path.append(self.split(branch, n_branch))
            for node in path:
                if node.refs == 0:
                    self.n_evictable -= node.end - node.start
                    self._adopt(node, lease)
                else:
                    self._pass(node, lease)
            if path:
                tip = path[-1]
        if tip.refs == 1 and not tip.children and tip.parent is not None and not tip.is_twin(lease):
            tip.edge += run[tip.end * size : n_blocks * size]
            tip.ids += lease.slice(tip.end, n_blocks).data
            tip.end = n_blocks
            lease.node = tip
        else:
            lease.node = self._attach(tip, lease, run, n_blocks)

    def _attach(self, parent: Node, lease: BlockLease, run: memoryview, n_blocks: int) -> Node:
        size = self._block_size
        start = parent.end
        node = Node(
            uid=self._uid(),
            parent=parent,
            key=bytes(run[start * size : (start + 1) * size]),
            edge=bytearray(run[start * size : n_blocks * size]),
            ids=bytearray(lease.slice(start, n_blocks).data),
            start=start,
        )
        node.refs = 1
        node.born_s = node.used_s = self._clock_s()
        parent.children[node.key] = node
        self.n_nodes += 1
        return node

    def split(self, node: Node, n_blocks: int) -> Node:
        """Cut the node's first `n_blocks` blocks off into a new parent, which is returned. Leases that hold
        the node hold both: they know their deepest node, and that stays."""
        parent = node.parent
        assert parent is not None
        n_edge = n_blocks * self._block_size * ID_BYTES
        n_ids = n_blocks * ID_BYTES
        upper = Node(
            uid=self._uid(),
            parent=parent,
            key=node.key,
            edge=node.edge[:n_edge],
            ids=node.ids[:n_ids],
            start=node.start,
        )
        upper.refs = node.refs
        upper.twins = None if node.twins is None else list(node.twins)
        upper.stamp = node.stamp
        upper.hits = node.hits
        upper.born_s = node.born_s
        upper.used_s = node.used_s
        del node.edge[:n_edge]
        del node.ids[:n_ids]
        node.start = upper.end
        node.key = bytes(node.edge[: self._block_size * ID_BYTES])
        node.parent = upper
        parent.children[upper.key] = upper
        upper.children[node.key] = node
        self.n_nodes += 1
        return upper

    # ---- twins ----

    def _pass(self, node: Node, lease: BlockLease) -> None:
        if node.twins is None:
            node.twins = [lease]
        else:
            node.twins.append(lease)

    def _leave(self, node: Node, lease: BlockLease) -> None:
        assert node.twins is not None
        node.twins.remove(lease)
        if not node.twins:
            node.twins = None

    def _adopt(self, node: Node, lease: BlockLease) -> None:
        """Nobody holds the node's blocks, but this lease holds copies and has blocks below: put the copies in
        their place. So two copies exist only while two leases need them, and a held node's parent is held."""
        self._pool.give(node.block_ids())
        node.ids = bytearray(lease.slice(node.start, node.end).data)
        node.refs = 1
        if node.twins is not None and lease in node.twins:
            self._leave(node, lease)

    # ---- removing ----

    def evict(self, n_blocks: int) -> None:
        """Free exactly `n_blocks` <= n_evictable blocks, the least recently used leaf's last block first."""
        self.n_evictable -= n_blocks
        self.n_evicted += n_blocks
        while n_blocks:
            node = self.queue.oldest()
            size = node.end - node.start
            if size > n_blocks:
                keep = size - n_blocks
                self._pool.give(node.block_ids()[keep:])
                del node.ids[keep * ID_BYTES :]
                del node.edge[keep * self._block_size * ID_BYTES :]
                node.end -= n_blocks
                return
            self.queue.pop()
            n_blocks -= size
            self._pool.give(node.block_ids())
            self._unlink(node)

    def own_top(self, lease: BlockLease, n_hit: int) -> Node | None:
        """The topmost node of the blocks that the lease itself published, from position `n_hit` on; None when
        it has published nothing. A lost node may begin earlier: its other holders hold all of it."""
        top = None
        for node in lease.lost:
            if node.end > n_hit:
                top = node
        here = lease.node
        assert here is not None
        while here.end > n_hit:
            if not here.is_twin(lease):
                if here.start < n_hit:
                    self.split(here, n_hit - here.start)
                top = here
            assert here.parent is not None
            here = here.parent
        return top

    def detach(self, top: Node) -> list[Node]:
        """Take an attached node and all below it out of the trie and free the unheld ones. Every lease on it
        must `lose` it next. Returns all of them, `top` first, their ids intact."""
        self._unlink(top)
        gone = [top]
        for node in gone:
            gone.extend(node.children.values())
        for node in gone:
            if node is not top:
                node.attached = False
                self.n_nodes -= 1
            node.children = {}
            if node.refs == 0:
                self.n_evictable -= node.end - node.start
                self._pool.give(node.block_ids())
        self.queue.compact(self.n_nodes)
        return gone

    def lose(self, lease: BlockLease, position: int) -> None:
        """The lease's nodes from `position` on are out of the trie: keep them in `lost`, and let its place in
        the trie end where it still holds something."""
        node = lease.node
        assert node is not None
        while node.parent is not None:
            if node.is_twin(lease):
                self._leave(node, lease)
            elif node.start >= position:
                lease.lost.append(node)
            else:
                break
            node = node.parent
        lease.node = node

    def flush(self, leases: Iterable[BlockLease]) -> int:
        """Take everything out of the trie; all live leases are named. Returns the blocks freed."""
        n_free = self._pool.n_free
        for root in list(self.roots.values()):
            for child in list(root.children.values()):
                self.detach(child)
        for lease in leases:
            self.lose(lease, 0)
        self.roots.clear()
        self.queue.clear()
        return self._pool.n_free - n_free

    def _unlink(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        node.attached = False
        self.n_nodes -= 1
        self._settle(parent)

    def _settle(self, node: Node) -> None:
        """The node may just have become an unheld leaf: queue it; or a root without use: drop it."""
        if node.refs or node.children:
            return
        if node.parent is not None:
            self.queue.push(node)
            return
        salt = salt_of(node)
        if self.roots.get(salt) is node:
            del self.roots[salt]

    def _uid(self) -> int:
        self._next_uid += 1
        return self._next_uid
