"""What the allocator's calls cost, first of all in the shape of TGI's own allocator benchmark.

    python -m bench.allocator

A "request" is one operation: a request's whole life in the allocator, as the scheduler runs it: `allocate`
(prompt and 13 tokens of growth room), `publish` of the prompt, `release`. TGI's benchmark times allocate and
free; its free is what publishes. Each operation is timed alone; Python's garbage collector stays on.

miss: the pool is full of cached prompts, no prefix is known, blocks are evicted in steady state
hit:  the same prompt again and again; all but its last token is found
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from allocator import make_allocator
from allocator.interface import I32, Allocator, Lease
from bench.hardware import describe_host, host_line
from bench.report import markdown_table, write_report

_Item = TypeVar("_Item")

RESULTS = Path(__file__).parent / "results"
N_POOL_TOKENS = 262_144
N_PROMPT = 7_936
VOCABULARY = 1_024
GROWTH_ROOM = 13
TGI_US = {"miss": 22.0, "hit": 10.0}
"""Median of TGI's Rust allocator, block size 1, the same shape on 2 shared cores."""


@dataclass(slots=True, frozen=True)
class Timing:
    block_size: int
    case: str
    median_us: float
    p99_us: float
    n_samples: int
    limit_us: float | None = None


class Bench:
    """Runs and collects the cases of one block size."""

    def __init__(self, *, block_size: int, n_samples: int) -> None:
        self.block_size = block_size
        self.n_samples = n_samples
        self.draw = np.random.default_rng(0)
        self.timings: list[Timing] = []

    def run(self) -> list[Timing]:
        self._requests()
        self._tiny_requests()
        self._calls()
        self._deep()
        return self.timings

    def _requests(self) -> None:
        allocator = self._full_pool()
        tgi = TGI_US if self.block_size == 1 else {}
        prompts = self._prompts(64)
        fresh = (prompt for _ in range(self.n_samples // 64 + 1) for prompt in self._prompts(64))
        before = allocator.stats()
        self._time("request, miss", fresh, lambda text: live(allocator, text), limit_us=tgi.get("miss"))
        after = allocator.stats()
        n_prompt_blocks = N_PROMPT // self.block_size
        n_evicted = after.evicted_blocks - before.evicted_blocks
        assert n_evicted >= (n_prompt_blocks - 2) * self.timings[-1].n_samples, "a miss must evict"
        live(allocator, prompts[0])
        before = allocator.stats()
        same = [prompts[0]] * self.n_samples
        self._time("request, full hit", same, lambda text: live(allocator, text), limit_us=tgi.get("hit"))
        n_hit = allocator.stats().hit_tokens - before.hit_tokens
        assert n_hit == (N_PROMPT - self.block_size) * self.n_samples, "a full hit must find all it may"
        half = [np.concatenate([prompts[0][: N_PROMPT // 2], p[N_PROMPT // 2 :]]) for p in self._prompts(256)]
        self._time("request, hit of one half, evicting", half, lambda text: live(allocator, text))
        self._time("match, full hit", same, lambda text: allocator.match(text))
        self._time("match, miss", self._prompts(256), lambda text: allocator.match(text))
        allocator.check()

    def _tiny_requests(self) -> None:
        """Short texts, so that the trie consists of many small nodes."""
        allocator = self._empty_pool()
        texts = [self._text(64) for _ in range(N_POOL_TOKENS // 64 + 4 * self.n_samples)]
        n_fill = N_POOL_TOKENS // 64
        for text in texts[:n_fill]:
            live(allocator, text)
        self._time("request of 64 tokens, miss", texts[n_fill:], lambda text: live(allocator, text))
        same = [texts[-1]] * self.n_samples
        self._time("request of 64 tokens, full hit", same, lambda text: live(allocator, text))

    def _calls(self) -> None:
        """One running request among many cached ones: what the scheduler calls as its answer grows."""
        allocator = self._full_pool()
        size = self.block_size
        n_steps = min(self.n_samples * 4, N_POOL_TOKENS // size // 4)
        text = self._text(N_PROMPT + n_steps * size)
        lease = take(allocator, text[:N_PROMPT])
        allocator.publish(lease, text, n_tokens=N_PROMPT)
        ends = range(N_PROMPT + GROWTH_ROOM + size, len(text) + 1, size)
        self._time("grow by one block, evicting", ends, lambda n: allocator.grow(lease, n_tokens=n))
        self._time("publish one block", ends, lambda n: allocator.publish(lease, text, n_tokens=n))
        self._time("publish, nothing new", ends, lambda n: allocator.publish(lease, text, n_tokens=n))
        allocator.release(lease)
        allocator.flush()
        other = take(allocator, text[:N_PROMPT])
        self._time("grow by one block", ends, lambda n: allocator.grow(other, n_tokens=n))
        allocator.check()

    def _deep(self) -> None:
        """A text whose prefixes were asked for one by one: 100 nodes on the path."""
        allocator = self._empty_pool()
        text = self._prompts(1)[0]
        live(allocator, text)
        for n in range(100, 0, -1):
            live(allocator, text[: n * N_PROMPT // 101])
        self._time("request, full hit, 100 nodes deep", [text] * self.n_samples, lambda t: live(allocator, t))

    def _empty_pool(self) -> Allocator:
        n_blocks = N_POOL_TOKENS // self.block_size + 1
        return make_allocator(n_blocks=n_blocks, block_size=self.block_size, prefix_caching=True)

    def _full_pool(self) -> Allocator:
        allocator = self._empty_pool()
        for _ in range(2):
            for prompt in self._prompts(N_POOL_TOKENS // N_PROMPT + 1):
                live(allocator, prompt)
        return allocator

    def _text(self, n_tokens: int) -> I32:
        return self.draw.integers(0, VOCABULARY, n_tokens, dtype=np.int32)

    def _prompts(self, n: int) -> list[I32]:
        return [self._text(N_PROMPT) for _ in range(n)]

    def _time(
        self,
        case: str,
        items: Iterable[_Item],
        call: Callable[[_Item], object],
        *,
        limit_us: float | None = None,
    ) -> None:
        clock = time.perf_counter_ns
        taken: list[int] = []
        for item in items:
            begin = clock()
            call(item)
            taken.append(clock() - begin)
        us = np.array(taken) / 1e3
        median, p99 = float(np.median(us)), float(np.percentile(us, 99))
        self.timings.append(Timing(self.block_size, case, median, p99, len(us), limit_us))


def take(allocator: Allocator, text: I32) -> Lease:
    lease = allocator.allocate(text, n_tokens=len(text) + GROWTH_ROOM)
    assert lease is not None
    return lease


def live(allocator: Allocator, text: I32) -> None:
    """A request's life."""
    lease = take(allocator, text)
    allocator.publish(lease, text, n_tokens=len(text))
    allocator.release(lease)


def memory_table(n_tokens: int = 1_048_576, *, block_size: int = 16) -> list[tuple[str, float]]:
    """(shape, bytes per cached token) of tries that hold `n_tokens`, the pool's own arrays aside."""
    draw = np.random.default_rng(0)
    rows = []
    for n_prompt in (8_192, 256, block_size):
        n_blocks = (n_tokens + n_prompt + GROWTH_ROOM) // block_size + 2
        allocator = make_allocator(n_blocks=n_blocks, block_size=block_size, prefix_caching=True)
        tracemalloc.start()
        for _ in range(n_tokens // n_prompt):
            live(allocator, draw.integers(0, 2**17, n_prompt, dtype=np.int32))
        used = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert allocator.stats().cached * block_size == n_tokens
        rows.append((f"texts of {n_prompt} tokens that share nothing", used / n_tokens))
    return rows


def timing_table(timings: Sequence[Timing]) -> str:
    head = ["block size", "case", "median µs", "p99 µs", "TGI median µs"]
    body = [
        [
            str(t.block_size),
            t.case,
            f"{t.median_us:.1f}",
            f"{t.p99_us:.1f}",
            "" if t.limit_us is None else f"{t.limit_us:g}",
        ]
        for t in timings
    ]
    return markdown_table(head, body)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=1000, help="timed operations per case, about")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the report")
    args = parser.parse_args()
    host = describe_host()
    timings = [t for size in (1, 16) for t in Bench(block_size=size, n_samples=args.samples).run()]
    memory = memory_table()
    table = timing_table(timings)
    memory_md = markdown_table(
        ["1,048,576 cached tokens, block size 16", "bytes per token"],
        [[shape, f"{n_bytes:.1f}"] for shape, n_bytes in memory],
    )
    print(f"{table}\n\n{memory_md}")
    document = {
        "command": f"python -m bench.allocator --samples {args.samples}",
        "host": host,
        "timings": [asdict(t) for t in timings],
        "bytes_per_cached_token": dict(memory),
    }
    markdown = (
        f"# Allocator\n\n`{document['command']}`; {host_line(host)}.\n\n"
        f"Pool of {N_POOL_TOKENS:,} tokens; prompts of {N_PROMPT:,} random tokens from {VOCABULARY:,} unless "
        f"said otherwise. A request is allocate (prompt + {GROWTH_ROOM}), publish the prompt, release. TGI's "
        f"figures: its Rust allocator, same shape, 2 shared cores.\n\n{table}\n\n{memory_md}"
    )
    for path in write_report(args.out, "allocator", document, markdown):
        print(path)


if __name__ == "__main__":
    main()
