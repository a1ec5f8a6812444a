"""A naive model of the radix allocator, one dict entry per cached block and a simulated KV cache.

It shares no code and no data structure with the allocator: prefixes are whole byte strings, the oldest leaf
is found by looking at all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

Key = tuple[str, bytes]
"""Salt and the int32 bytes of the whole prefix up to the block's end."""


@dataclass(eq=False, slots=True)
class Entry:
    key: Key
    block: int
    parent: Entry | None
    holders: list[ModelLease] = field(default_factory=list)
    twins: list[ModelLease] = field(default_factory=list)
    stamp: int = 0
    n_children: int = 0
    detached: bool = False


@dataclass(eq=False, slots=True)
class ModelLease:
    salt: str
    text: np.ndarray
    table: list[int]
    n_hit: int
    path: list[Entry]
    n_published: int
    sealed: bool = False
    lost: dict[int, Entry] = field(default_factory=dict)


@dataclass(slots=True)
class Plan:
    """What an allocation must do."""

    hits: list[Entry]
    n_new: int
    victims: list[Entry] | None
    """In the order of eviction; None: refused."""


class Model:
    def __init__(self, *, n_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.n_blocks = n_blocks
        self.free = set(range(1, n_blocks))
        self.entries: dict[Key, Entry] = {}
        self.leases: list[ModelLease] = []
        self.dirty: set[int] = set()
        self.kv: dict[int, Key | None] = {}
        """What the positions of a block really hold; None: whatever its last user left."""
        self.now = 0

    # ---- what must come ----

    def key(self, salt: str, text: np.ndarray, n_blocks: int) -> Key:
        return salt, text[: n_blocks * self.block_size].tobytes()

    def hits(self, text: np.ndarray, salt: str) -> list[Entry]:
        found: list[Entry] = []
        for n in range(1, (len(text) - 1) // self.block_size + 1):
            entry = self.entries.get(self.key(salt, text, n))
            if entry is None:
                break
            found.append(entry)
        return found

    def plan_allocate(self, text: np.ndarray, n_tokens: int, salt: str) -> Plan:
        hits = self.hits(text, salt)
        n_new = -(-n_tokens // self.block_size) - len(hits)
        return Plan(hits, n_new, self.victims(n_new, keep=hits))

    def victims(self, n_new: int, *, keep: list[Entry]) -> list[Entry] | None:
        """The entries to evict so that `n_new` blocks are free: the oldest unheld leaf, again and again."""
        kept = set(map(id, keep))
        children = {id(entry): entry.n_children for entry in self.entries.values()}
        alive = [e for e in self.entries.values() if not e.holders and id(e) not in kept]
        chosen: list[Entry] = []
        for _ in range(n_new - len(self.free)):
            leaves = [e for e in alive if children[id(e)] == 0]
            if not leaves:
                return None
            oldest = min(leaves, key=lambda e: e.stamp)
            assert sum(e.stamp == oldest.stamp for e in leaves) == 1, "the order of use must be total"
            chosen.append(oldest)
            alive.remove(oldest)
            if oldest.parent is not None:
                children[id(oldest.parent)] -= 1
        return chosen

    # ---- what happens ----

    def evict(self, victims: list[Entry]) -> None:
        for entry in victims:
            self._drop(entry)
            self.free.add(entry.block)

    def hand_out(self, blocks: list[int]) -> set[int]:
        """These blocks get a new owner. Returns those that must be zeroed."""
        assert len(set(blocks)) == len(blocks), "a block was handed out twice"
        assert set(blocks) <= self.free, "a block that was in use was handed out"
        self.free -= set(blocks)
        for block in blocks:
            self.kv[block] = None
        dirty = self.dirty & set(blocks)
        self.dirty -= dirty
        return dirty

    def lease(self, text: np.ndarray, salt: str, table: list[int], hits: list[Entry]) -> ModelLease:
        lease = ModelLease(salt, text, table, len(hits), list(hits), len(hits))
        for entry in hits:
            entry.holders.append(lease)
        self.leases.append(lease)
        return lease

    def publish(self, lease: ModelLease, n_tokens: int) -> None:
        n = n_tokens // self.block_size
        self._compute(lease, n)
        if n <= lease.n_published or lease.sealed:
            return
        lease.n_published = n
        known: list[Entry] = []
        for i in range(len(lease.path), n):
            entry = self.entries.get(self.key(lease.salt, lease.text, i + 1))
            if entry is None:
                break
            known.append(entry)
        if len(lease.path) + len(known) == n:
            return
        for entry in known:
            if entry.holders:
                entry.twins.append(lease)
            else:
                self._adopt(entry, lease, len(lease.path))
            lease.path.append(entry)
        for i in range(len(lease.path), n):
            key = self.key(lease.salt, lease.text, i + 1)
            parent = lease.path[-1] if lease.path else None
            entry = Entry(key, lease.table[i], parent, [lease])
            if parent is not None:
                parent.n_children += 1
            self.entries[key] = entry
            lease.path.append(entry)

    def release(self, lease: ModelLease) -> None:
        self.now += 1
        self.leases.remove(lease)
        for i in range(len(lease.path), len(lease.table)):
            if i not in lease.lost:
                self.free.add(lease.table[i])
                continue
            lost = lease.lost[i]
            lost.holders.remove(lease)
            if not lost.holders:
                self.free.add(lost.block)
        for i in reversed(range(len(lease.path))):
            entry = lease.path[i]
            if lease in entry.twins:
                entry.twins.remove(lease)
                self.free.add(lease.table[i])
                continue
            entry.holders.remove(lease)
            entry.stamp = self.now
            if entry.holders:
                continue
            if entry.twins:
                self._adopt(entry, entry.twins[0], i)

    def invalidate(self, lease: ModelLease) -> list[ModelLease]:
        lease.sealed = True
        self.dirty |= set(lease.table[lease.n_hit :])
        own = {i: e for i, e in enumerate(lease.path) if i >= lease.n_hit and lease in e.holders}
        own |= {i: e for i, e in lease.lost.items() if i >= lease.n_hit}
        if not own:
            return []
        first = min(own)
        top = own[first]
        victims = [other for other in self.leases if other is not lease and self._holds_below(other, top)]
        if not top.detached:
            salt, prefix = top.key
            below = [e for e in self.entries.values() if e.key[0] == salt and e.key[1].startswith(prefix)]
            for entry in sorted(below, key=lambda e: -len(e.key[1])):
                self._detach(entry)
                self.dirty.add(entry.block)
        self._lose(lease)
        for victim in victims:
            victim.sealed = True
            self.dirty |= set(victim.table[first:])
            self._lose(victim)
        return victims

    def flush(self) -> int:
        n_free = len(self.free)
        for entry in sorted(self.entries.values(), key=lambda e: -len(e.key[1])):
            self._detach(entry)
        for lease in self.leases:
            lease.sealed = True
            self._lose(lease)
        return len(self.free) - n_free

    def _holds_below(self, lease: ModelLease, top: Entry) -> bool:
        held = [e for e in lease.path if lease in e.holders] + list(lease.lost.values())
        for entry in held:
            here: Entry | None = entry
            while here is not None:
                if here is top:
                    return True
                here = here.parent
        return False

    def _lose(self, lease: ModelLease) -> None:
        """The path ends at the last entry that the lease holds in the trie."""
        while lease.path:
            entry = lease.path[-1]
            if lease in entry.twins:
                entry.twins.remove(lease)
            elif entry.detached:
                lease.lost[len(lease.path) - 1] = entry
            else:
                return
            lease.path.pop()

    # ---- counts ----

    def n_cached(self) -> int:
        return sum(not entry.holders for entry in self.entries.values())

    def n_shared(self) -> int:
        entries = {id(entry): entry for lease in self.leases for entry in (*lease.path, *lease.lost.values())}
        return sum(len(entry.holders) > 1 for entry in entries.values())

    def _compute(self, lease: ModelLease, n_blocks: int) -> None:
        """The worker writes the KV of the lease's own blocks."""
        for i in range(lease.n_hit, n_blocks):
            block = lease.table[i]
            key = self.key(lease.salt, lease.text, i + 1)
            if self.kv[block] is None:
                others = [x for x in self.leases if x is not lease and block in x.table]
                assert not others, f"block {block} is written under another lease"
                self.kv[block] = key
            assert self.kv[block] == key, f"block {block} changed under its lease"

    def _adopt(self, entry: Entry, lease: ModelLease, position: int) -> None:
        self.free.add(entry.block)
        entry.block = lease.table[position]
        entry.holders.append(lease)
        if lease in entry.twins:
            entry.twins.remove(lease)

    def _detach(self, entry: Entry) -> None:
        self._drop(entry)
        entry.detached = True
        if not entry.holders:
            self.free.add(entry.block)

    def _drop(self, entry: Entry) -> None:
        assert entry.n_children == 0
        del self.entries[entry.key]
        if entry.parent is not None:
            entry.parent.n_children -= 1
