"""The core against fake workers under random interleavings: composed, computed and applied steps, cancels,
deadlines, priorities, replica deaths, tiny pools. Texts stay those of an undisturbed worker.

Full size (`QUIRE_TEST_FULL=1`): 1,000 runs. Otherwise a seeded sample of the same code: 24 shorter ones.
"""

from __future__ import annotations

import itertools
import os
import random

import pytest

from router.errors import RouterError
from router.ipc.messages import SamplingSpec
from tests.router.sim import Sim, text

FULL = os.environ.get("QUIRE_TEST_FULL") == "1"
VARIANTS = list(itertools.product((1, 2, 16), (1, 2, 3), (True, False), (True, False)))
"""Block size, window, chunking, caching."""
N_RUNS = 1000 if FULL else 24
N_ACTS = 250 if FULL else 120


class RandomRun:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        block_size, window, chunking, caching = VARIANTS[seed % len(VARIANTS)]
        n_tokens = rng.choice((64, 96, 256))
        self.longest = 60
        self.n_replicas = rng.choice((1, 1, 2, 3))
        self.sim = Sim(
            n_replicas=self.n_replicas,
            seed=seed,
            block_size=block_size,
            fake_n_blocks=max(2, n_tokens // block_size + 1),
            fake_eos_rate=rng.choice((0.0, 0.05)),
            max_batch_size=rng.choice((1, 3, 8)),
            max_batch_prefill_tokens=64 if not chunking else rng.choice((5, 16, 64)),
            config={
                "window": window,
                "prefill_chunking": chunking,
                "prefix_caching": caching,
                "max_total_tokens": self.longest,
                "waiting_served_ratio": rng.choice((0.0, 0.0, 0.5)),
                "max_queue_passes": rng.choice((0, 4, 64)),
            },
        )
        self.stems = [text(30, seed=seed * 100 + i) for i in range(3)]
        self.n_submitted = 0

    def prompt(self) -> list[int]:
        stem = self.rng.choice(self.stems)
        kept = stem[: self.rng.randrange(0, len(stem) + 1)]
        return kept + text(self.rng.randrange(1, 12), seed=self.rng.randrange(10))

    def sampling(self) -> SamplingSpec:
        return self.rng.choice(
            (
                SamplingSpec(temperature=0.0),
                SamplingSpec(temperature=0.0, ignore_eos=True),
                SamplingSpec(temperature=0.8, seed=self.rng.randrange(100), top_p=0.9),
                SamplingSpec(
                    temperature=0.5,
                    seed=3,
                    repetition_penalty=1.1,
                    presence_penalty=0.5,
                    frequency_penalty=0.25,
                    min_new_tokens=4,
                ),
            )
        )

    def submit(self) -> None:
        rng = self.rng
        prompts = [self.prompt()] * rng.choice((1, 1, 1, 4))
        longest = max(map(len, prompts))
        n_new = rng.choice((None, 1, 2, rng.randrange(1, self.longest - longest + 1)))
        if n_new is not None:
            n_new = min(n_new, self.longest - longest)
        self.sim.submit(
            *prompts,
            n_new=n_new,
            sampling=self.sampling(),
            priority=rng.choice((0, 0, 0, 1, -1)),
            deadline_s=rng.choice((None, None, None, None, 3.0)),
        )
        self.n_submitted += len(prompts)

    def act(self) -> None:
        rng, sim = self.rng, self.sim
        sim.now += rng.choice((0.0, 0.01, 0.05))
        what = rng.random()
        if what < 0.12:
            self.submit()
        elif what < 0.15 and sim.answers:
            sim.cancel(rng.choice(list(sim.answers)))
        elif what < 0.16 and sim.replicas:
            replica_id = rng.choice(list(sim.replicas))
            sim.down(replica_id)
        elif what < 0.20 and len(sim.replicas) < self.n_replicas:
            missing = next(i for i in range(self.n_replicas) if i not in sim.replicas)
            sim.up(missing, probing=rng.random() < 0.5)
        elif what < 0.205:
            sim.core.flush_cache()
        elif sim.replicas:
            replica_id = rng.choice(list(sim.replicas))
            replica = sim.replicas[replica_id]
            move = rng.random()
            if move < 0.4:
                sim.compose(replica_id)
            elif move < 0.7 and replica.sent:
                sim.compute(replica_id)
            elif replica.computed:
                sim.apply(replica_id)

    def finish(self) -> None:
        sim = self.sim
        for i in range(self.n_replicas):
            if i not in sim.replicas:
                sim.up(i)
        for replica_id, replica in sim.replicas.items():
            while replica.sent:
                sim.compute(replica_id)
            while replica.computed:
                sim.apply(replica_id)
        sim.run()
        sim.assert_right()
        sim.assert_empty()
        assert len(sim.answers) == self.n_submitted
        for request_id, answer in sim.answers.items():
            assert answer.done, f"request {request_id} never ended"
            if answer.error is not None:
                assert answer.error.code in ("deadline_exceeded", "replica_lost")


@pytest.mark.parametrize("seed", range(N_RUNS))
def test_random_interleavings(seed: int) -> None:
    run = RandomRun(seed)
    try:
        for _ in range(N_ACTS):
            run.act()
    except RouterError as error:
        raise AssertionError(f"a valid request was refused: {error}") from error
    run.finish()
