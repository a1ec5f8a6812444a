"""Sampling: noise, filters, penalties, independence from the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proto.codec import pack_f32, pack_i32
from proto.worker_pb2 import Sampling
from worker.grammar.rows import Masks
from worker.sampling import Sampler, SampleResult
from worker.sampling_filters import FilterParams, candidates
from worker.sampling_noise import gumbel_noise, gumbel_noise_rows, row_keys

VOCAB = 600
CPU = torch.device("cpu")


def make_sampler(
    samplings: list[Sampling], tokens: list[list[int]] | None = None, n_prompt: int = 4
) -> Sampler:
    sampler = Sampler(vocab_size=VOCAB, max_rows=64, device=CPU)
    for row, sampling in enumerate(samplings):
        known = np.array(tokens[row] if tokens else [1, 2, 3, 4], dtype=np.int32)
        sampler.admit(row, sampling, tokens=known, n_prompt=n_prompt)
    return sampler


def sample(sampler: Sampler, logits: torch.Tensor, rows: list[int], position: int = 4) -> SampleResult:
    places = np.full(len(rows), position, dtype=np.int32)
    return sampler.sample(logits, np.array(rows, dtype=np.int32), places)


def logits_of(n: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1), st.lists(st.integers(0, 2**31 - 1), min_size=1))
def test_noise_equals_the_documented_arithmetic(seed: int, position: int, ids: list[int]) -> None:
    key0, key1 = row_keys([seed], [position])
    tensors = [torch.from_numpy(key.view(np.int32)) for key in (key0, key1)]
    got = gumbel_noise_rows(*tensors, torch.tensor(ids, dtype=torch.int32))[0].numpy()
    np.testing.assert_allclose(got, gumbel_noise(seed, position, ids), rtol=1e-5, atol=1e-6)


def test_noise_by_python_integers() -> None:
    """The formula of the docstring, once more, with nothing that could overflow."""
    m = 0xFFFFFFFF

    def mix(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x7FEB352D & m
        x = (x ^ (x >> 15)) * 0x846CA68B & m
        return x ^ (x >> 16)

    seed, position, token = 0xFEDCBA9876543210, 1234, 49151
    key0 = mix(mix(mix((seed & m) ^ 0x9E3779B9) ^ (seed >> 32)) ^ position)
    key1 = mix((key0 + 0x9E3779B9) & m)
    x = (token * 0x9E3779B1 & m) ^ key0
    x = (x ^ (x >> 16)) * 0x7FEB352D & m
    x = ((x ^ (x >> 15)) + key1) * 0x846CA68B & m
    h = x ^ (x >> 16)
    w = min((float(h >> 1) + 0.5) * 2.0**-31, 1 - 2.0**-24)
    expected = -np.log(-np.log1p(-w))
    assert gumbel_noise(seed, position, [token])[0] == pytest.approx(expected, rel=1e-4)


def test_noise_is_gumbel_distributed() -> None:
    noise = np.concatenate([gumbel_noise(seed, 7, np.arange(50_000)) for seed in range(8)])
    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.03)


def test_draws_follow_the_softmax() -> None:
    sampler = make_sampler([Sampling(temperature=0.8, seed=3)])
    logits = torch.full((1, VOCAB), -30.0)
    logits[0, :4] = torch.tensor([1.0, 0.5, 0.0, -1.0])
    counts = np.zeros(4)
    for position in range(4, 4004):
        counts[int(sample(sampler, logits, [0], position).tokens[0])] += 1
    expected = (logits[0, :4] / 0.8).softmax(-1).numpy()
    np.testing.assert_allclose(counts / counts.sum(), expected, atol=0.03)


KINDS = [
    Sampling(),
    Sampling(temperature=1.0, seed=11),
    Sampling(temperature=1.3, seed=12, top_k=5),
    Sampling(temperature=0.9, seed=13, top_p=0.8),
    Sampling(temperature=1.1, seed=14, min_p=0.1),
    Sampling(temperature=1.0, seed=15, typical_p=0.7),
    Sampling(temperature=1.0, seed=16, top_k=400, top_p=0.95, min_p=0.01),
    Sampling(repetition_penalty=1.5, presence_penalty=0.5),
    Sampling(temperature=1.0, seed=17, frequency_penalty=1.0),
    Sampling(temperature=1.0, seed=18, bias_ids=pack_i32([5]), bias_values=pack_f32([3.0])),
]


def test_a_rows_text_does_not_depend_on_its_company() -> None:
    together = make_sampler(KINDS)
    alone = [make_sampler(KINDS) for _ in KINDS]
    order = [7, 2, 9, 0, 5, 1, 8, 3, 6, 4]
    for position in range(4, 24):
        logits = logits_of(len(KINDS), seed=position)
        got = sample(together, logits[order], order, position).tokens
        for place, row in enumerate(order):
            solo = sample(alone[row], logits[row : row + 1], [row], position).tokens
            assert int(got[place]) == int(solo[0]), f"row {row} at {position}"


def test_state_is_rebuilt_after_a_move() -> None:
    """Penalties count the tokens after the original prompt, wherever the row was admitted."""
    penalties = Sampling(
        temperature=1.0, seed=4, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.9
    )
    still = make_sampler([penalties])
    tokens = [1, 2, 3, 4]
    for position in range(4, 20):
        logits = logits_of(1, seed=position, scale=1.0)
        moved = make_sampler([penalties], tokens=[tokens])
        expected = int(sample(moved, logits, [0], position).tokens[0])
        assert int(sample(still, logits, [0], position).tokens[0]) == expected
        tokens.append(expected)


def test_penalties_by_hand() -> None:
    sampler = make_sampler(
        [Sampling(repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)],
        tokens=[[10, 11, 12, 13, 20, 20]],
    )
    logits = torch.zeros(1, VOCAB)
    # 20: 9/2 - 0.25 - 2*0.5 = 3.25; 10 (prompt only): 6/2 = 3; 30 (unseen): 3.2.
    logits[0, 20], logits[0, 10], logits[0, 30] = 9.0, 6.0, 3.2
    assert int(sample(sampler, logits, [0], 6).tokens[0]) == 20
    # Now three times: 9/2 - 0.25 - 1.5 = 2.75.
    assert int(sample(sampler, logits, [0], 7).tokens[0]) == 30


def test_min_new_tokens_masks_the_end() -> None:
    sampler = make_sampler([Sampling(min_new_tokens=2, eos_ids=pack_i32([9]))])
    logits = torch.zeros(1, VOCAB)
    logits[0, 9], logits[0, 8] = 5.0, 4.0
    tokens = [int(sample(sampler, logits, [0], position).tokens[0]) for position in (4, 5, 6)]
    assert tokens == [8, 8, 9]


def test_logit_bias_can_forbid_and_force() -> None:
    bias = Sampling(bias_ids=pack_i32([3, 7]), bias_values=pack_f32([-100.0, 100.0]))
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 20.0
    assert int(sample(make_sampler([bias]), logits, [0]).tokens[0]) == 7


def test_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="token 600, but the vocabulary has 600"):
        make_sampler([Sampling(bias_ids=pack_i32([600]), bias_values=pack_f32([1.0]))])


def test_nan_concerns_only_its_row() -> None:
    sampler = make_sampler([Sampling(), Sampling(temperature=1.0, seed=1), Sampling()])
    logits = logits_of(3)
    clean = sample(make_sampler([Sampling()] * 3), logits, [0, 1, 2])
    logits[1, 5] = float("nan")
    got = sample(sampler, logits, [0, 1, 2])
    assert got.usable.tolist() == [True, False, True]
    assert got.tokens[[0, 2]].tolist() == clean.tokens[[0, 2]].tolist()


def test_logprobs_are_of_the_unmodified_logits() -> None:
    sampler = make_sampler(
        [
            Sampling(),
            Sampling(temperature=2.0, seed=1, top_logprobs=3, logprobs=True, repetition_penalty=1.5),
            Sampling(logprobs=True),
        ]
    )
    logits = logits_of(3)
    got = sample(sampler, logits.clone(), [0, 1, 2])
    assert got.logprobs is not None
    assert got.logprobs.index.tolist() == [1, 2]
    assert got.logprobs.n_top.tolist() == [3, 0]
    raw = logits.log_softmax(-1)
    torch.testing.assert_close(got.logprobs.chosen, raw[[1, 2], got.tokens[[1, 2]]])
    torch.testing.assert_close(got.logprobs.top_values[0], raw[1].topk(3).values)
    assert got.logprobs.top_ids[0].tolist() == raw[1].topk(3).indices.tolist()


def survivors(logits: torch.Tensor, **params: float) -> set[int]:
    def column(name: str, dtype: torch.dtype) -> torch.Tensor | None:
        return torch.tensor([[params[name]]], dtype=dtype) if name in params else None

    values, ids = candidates(
        logits,
        FilterParams(
            top_k=column("top_k", torch.int64),
            top_p=column("top_p", torch.float32),
            min_p=column("log_min_p", torch.float32),
            typical_p=column("typical_p", torch.float32),
            largest_k=int(params.get("top_k", VOCAB)),
        ),
    )
    return set(ids[0][values[0] > -torch.inf].tolist())


@pytest.mark.parametrize("scale", [0.01, 3.0])
@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.999])
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(top_p: float, scale: float) -> None:
    """Also when it is larger than the first look at the candidates."""
    logits = logits_of(1, scale=scale)
    p, order = logits[0].double().softmax(-1).sort(descending=True)
    n = int((p.cumsum(0) - p < top_p).sum())
    assert survivors(logits, top_p=top_p) == set(order[:n].tolist())


def test_top_k_keeps_ties() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [3, 5, 7, 9]] = torch.tensor([4.0, 3.0, 3.0, 2.0])
    assert survivors(logits, top_k=2) == {3, 5, 7}


def test_min_p_and_typical_p() -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, :4] = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert survivors(logits, top_k=4, log_min_p=float(np.log(0.25))) == {0, 1, 2}
    # Entropy 1.142: surprises are 0.693, 1.204, 1.897, 2.996, so token 1 is the most typical, then 0.
    assert survivors(logits, typical_p=0.25) == {1}
    assert survivors(logits, typical_p=0.7) == {0, 1}


def masks_of(index: list[int], allowed: list[list[int]], *, ends: bool = False) -> Masks:
    """As the rows' grammars give them."""
    bits = np.zeros((len(index), -(-VOCAB // 32) * 32), dtype=np.uint8)
    for line, ids in enumerate(allowed):
        bits[line, ids] = 1
    words = np.packbits(bits, axis=1, bitorder="little").view("<i4").astype(np.int32)
    return Masks(index=np.array(index), bits=words, ends=np.full(len(index), ends))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=1.0, seed=3),
        Sampling(temperature=2.0, seed=3, top_p=0.3),
        Sampling(temperature=2.0, seed=3, top_k=2, min_p=0.4),
        Sampling(repetition_penalty=1.3, presence_penalty=1.0),
    ],
)
def test_a_mask_binds_its_row_alone(sampling: Sampling) -> None:
    logits = logits_of(3)
    free = sample(make_sampler([sampling] * 3), logits, [0, 1, 2]).tokens.tolist()
    masks = masks_of([1], [[7, 31, 32, VOCAB - 1]])
    sampler = make_sampler([sampling] * 3)
    places = np.full(3, 4, dtype=np.int32)
    bound = sampler.sample(logits, np.arange(3, dtype=np.int32), places, masks=masks)
    assert bound.usable.all()
    tokens = bound.tokens.tolist()
    assert [tokens[0], tokens[2]] == [free[0], free[2]]
    assert tokens[1] in (7, 31, 32, VOCAB - 1)


def test_the_likeliest_allowed_token_wins() -> None:
    logits = logits_of(1)
    allowed = [5, 90, 400]
    result = make_sampler([Sampling(logprobs=True)]).sample(
        logits,
        np.zeros(1, dtype=np.int32),
        np.full(1, 4, dtype=np.int32),
        masks=masks_of([0], [allowed]),
    )
    assert result.tokens.tolist() == [max(allowed, key=lambda token: float(logits[0, token]))]
    assert result.logprobs is not None
    raw = torch.log_softmax(logits[0], dim=-1)[result.tokens]
    torch.testing.assert_close(result.logprobs.chosen, raw)


def test_nothing_allowed_is_told_from_broken_logits() -> None:
    logits = logits_of(2)
    logits[1, 3] = torch.nan
    bias = Sampling(bias_ids=pack_i32([5]), bias_values=pack_f32([float("-inf")]))
    masks = masks_of([0, 1], [[5], [5]])
    result = make_sampler([bias, bias]).sample(
        logits, np.arange(2, dtype=np.int32), np.full(2, 4, dtype=np.int32), masks=masks
    )
    assert result.usable.tolist() == [False, False]
    assert result.finite.tolist() == [True, False]


def test_a_minimum_length_gives_way_to_a_text_that_is_complete() -> None:
    sampling = Sampling(min_new_tokens=10, eos_ids=pack_i32([2]))
    for ends, usable in ((True, True), (False, False)):
        result = make_sampler([sampling]).sample(
            logits_of(1),
            np.zeros(1, dtype=np.int32),
            np.full(1, 4, dtype=np.int32),
            masks=masks_of([0], [[2]], ends=ends),
        )
        assert result.usable.tolist() == [usable]
