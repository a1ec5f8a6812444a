from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from proto.codec import pack_i32, unpack_i32
from router.admission import make_request
from router.errors import InvalidRequestError
from router.ipc.messages import GrammarSpec, RequestSpec, SamplingSpec
from router.request import Request
from tests.router.sim import Sim


@pytest.fixture(scope="module")
def sim() -> Sim:
    return Sim(block_size=16, fake_n_blocks=65, config={"max_input_tokens": 500, "max_total_tokens": 800})


def make(sim: Sim, **fields: Any) -> Request:
    fields.setdefault("prompt", pack_i32([1, 2, 3]))
    return make_request(
        RequestSpec(id=1, **fields),
        conn=1,
        order=0,
        limits=sim.limits,
        default_deadline_s=10.0,
        rng=random.Random(0),
        now=5.0,
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": b""}, "the prompt is empty"),
        ({"prompt": b"abc"}, "3 bytes"),
        ({"prompt": pack_i32(np.ones(501))}, r"501 tokens, but at most 500"),
        ({"prompt": pack_i32([1, 1000])}, r"token id 1000, but ids are 0 to 999"),
        ({"prompt": pack_i32([-1])}, r"token id -1"),
        ({"max_new_tokens": 0}, r"max_tokens is 0"),
        ({"max_new_tokens": 798}, r"together 801, but at most 800"),
        ({"sampling": SamplingSpec(top_logprobs=21)}, r"top_logprobs is 21.* 0 to 20"),
        ({"sampling": SamplingSpec(logit_bias={1000: 1.0})}, r"logit_bias names token id 1000"),
        ({"sampling": SamplingSpec(stop_token_ids=[-5])}, r"stop_token_ids names token id -5"),
        ({"sampling": SamplingSpec(prompt_logprobs=99)}, r"prompt_logprobs is 99"),
        ({"grammar": GrammarSpec(kind=99, source="")}, "unknown kind of grammar: 99"),
        ({"adapter_id": "french"}, r"adapter 'french' is not loaded"),
        ({"sampling": SamplingSpec(top_k=-1)}, "out of range"),
        ({"sampling": SamplingSpec(min_new_tokens=2**40)}, "out of range"),
        ({"priority": 2**40}, r"priority is 1099511627776"),
        ({"deadline_s": 0.0}, "deadline is 0.0 s"),
        ({"deadline_s": float("nan")}, "deadline is nan s"),
    ],
)
def test_what_can_never_be_served_names_value_and_limit(
    sim: Sim, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refused:
        make(sim, **fields)
    assert 400 <= refused.value.info.status < 500


def test_an_open_end_is_as_long_as_allowed(sim: Sim) -> None:
    assert make(sim, max_new_tokens=None).end_len == 800
    assert make(sim, max_new_tokens=5).end_len == 8


def test_every_request_has_a_seed(sim: Sim) -> None:
    assert make(sim).sampling.seed != 0
    assert make(sim, sampling=SamplingSpec(seed=7)).sampling.seed == 7
    assert make(sim, sampling=SamplingSpec(seed=-1)).sampling.seed == 2**64 - 1
    assert make(sim, sampling=SamplingSpec(seed=0)).sampling.seed == 0


def test_min_new_tokens_masks_what_would_end_the_answer(sim: Sim) -> None:
    spec = SamplingSpec(min_new_tokens=3, stop_token_ids=[9])
    assert unpack_i32(make(sim, sampling=spec).sampling.eos_ids).tolist() == [2, 9]
    spec = SamplingSpec(min_new_tokens=3, ignore_eos=True)
    assert unpack_i32(make(sim, sampling=spec).sampling.eos_ids).tolist() == []


def test_deadlines_are_counted_from_arrival(sim: Sim) -> None:
    assert make(sim).deadline_s == 15.0
    assert make(sim, deadline_s=2.5).deadline_s == 7.5


def test_prompt_logprobs_share_nothing(sim: Sim) -> None:
    plain = make(sim)
    asks = make(sim, sampling=SamplingSpec(prompt_logprobs=1))
    assert plain.salt == ""
    assert asks.salt != plain.salt


def test_stop_token_ids_end_an_answer() -> None:
    sim = Sim(block_size=16)
    prompt = [5, 6, 7]
    (a,) = sim.submit(prompt, n_new=10)
    sim.run()
    third = sim.answers[a].tokens[2]
    (b,) = sim.submit(prompt, n_new=10, sampling=SamplingSpec(temperature=0.0, stop_token_ids=[third]))
    sim.run()
    first = sim.answers[a].tokens.index(third)
    assert sim.answers[b].tokens == sim.answers[a].tokens[: first + 1]
    assert sim.answers[b].reason == 1
    sim.assert_empty()


def test_ignore_eos_goes_on() -> None:
    sim = Sim(block_size=16, fake_eos_rate=0.3)
    (a,) = sim.submit([5, 6, 7], n_new=40)
    (b,) = sim.submit([5, 6, 7], n_new=40, sampling=SamplingSpec(temperature=0.0, ignore_eos=True))
    sim.run()
    assert sim.answers[a].tokens[-1] == 2
    assert len(sim.answers[a].tokens) < 40
    assert len(sim.answers[b].tokens) == 40
    assert sim.answers[b].reason == 2
    sim.assert_right()
