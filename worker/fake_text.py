"""What the fake worker "says": pure functions from tokens and sampling parameters to the next token.

A position's hash is h(p) = h(p - 1) · A + g(token(p)) mod 2^64: it stands for the whole text up to there,
in its order. Since A is odd it has an inverse, and a run of n positions is one cumulative sum. The next
token is a mix of the last hash, of the sampling parameters and, where penalties are on, of the history.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from proto.worker_pb2 import Sampling

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
U64 = npt.NDArray[np.uint64]

_A = 0x9E3779B97F4A7C15
_A_INVERSE = pow(_A, -1, 2**64)
_ROOT = 0x243F6A8885A308D3
_GAMMA = np.uint64(0xD1B54A32D192ED03)
_HISTORY = np.uint64(0xC2B2AE3D27D4EB4F)
N_TOP = 20
"""Ranked candidates that a position has a logprob for."""


@dataclass(frozen=True, slots=True)
class FakeVocab:
    """Which token ids exist and which of them end an answer."""

    size: int
    eos_token_ids: tuple[int, ...] = ()
    eos_rate: float = 0.0
    """Probability that a sampled token is the first of `eos_token_ids`."""
    regular: I32 = field(init=False, repr=False, compare=False)
    """All ids that end nothing."""

    def __post_init__(self) -> None:
        ids = np.arange(self.size, dtype=np.int32)
        object.__setattr__(self, "regular", ids[~np.isin(ids, np.array(self.eos_token_ids, dtype=np.int32))])
        if len(self.regular) < N_TOP:
            raise ValueError(f"a fake vocabulary needs {N_TOP} tokens beside EOS, not {len(self.regular)}")


@dataclass(frozen=True, slots=True)
class FakeSampling:
    """The part of a row's parameters that decides its tokens."""

    fingerprint: int = 0
    """Hash of every parameter that matters; 0 for plain greedy."""
    uses_history: bool = False
    history_has_prompt: bool = False
    min_new_tokens: int = 0

    @classmethod
    def of(cls, sampling: Sampling) -> FakeSampling:
        top_p = sampling.top_p or 1.0
        typical_p = sampling.typical_p or 1.0
        repetition = sampling.repetition_penalty or 1.0
        penalties = (repetition, sampling.presence_penalty, sampling.frequency_penalty)
        has_penalties = penalties != (1.0, 0.0, 0.0)
        parts = b""
        if sampling.temperature > 0:
            parts += struct.pack(
                "<dqdddQ",
                sampling.temperature,
                sampling.top_k,
                top_p,
                sampling.min_p,
                typical_p,
                sampling.seed,
            )
        if has_penalties:
            parts += struct.pack("<ddd", *penalties)
        if sampling.bias_ids:
            parts += sampling.bias_ids + sampling.bias_values
        return cls(
            fingerprint=_digest(parts) if parts else 0,
            uses_history=has_penalties,
            history_has_prompt=repetition != 1.0,
            min_new_tokens=sampling.min_new_tokens,
        )

    def history(self, tokens: I32, *, n_prompt: int) -> int:
        """The order-free sum over the tokens that penalties look at."""
        if not self.uses_history:
            return 0
        seen = tokens if self.history_has_prompt else tokens[n_prompt:]
        return int(token_hash(seen).sum(dtype=np.uint64))


def mix(values: U64) -> U64:
    """A bijection of 64 bits that spreads every input bit (finalizer of SplitMix64, Steele et al. 2014)."""
    z = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def token_hash(tokens: I32) -> U64:
    """[n] token ids as [n] well-spread hashes."""
    return mix((tokens.astype(np.uint64) + np.uint64(1)) * _GAMMA)


def root(adapter_id: str) -> int:
    """The hash before position 0. An adapter's KV differs from the base model's."""
    return _ROOT ^ _digest(adapter_id.encode()) if adapter_id else _ROOT


def chain(before: int, tokens: I32) -> U64:
    """Hashes of [n] positions that follow the hash `before`."""
    powers, inverses = _powers(1 << max(8, (len(tokens) - 1).bit_length()))
    total = np.cumsum(token_hash(tokens) * inverses[: len(tokens)], dtype=np.uint64)
    return (total + np.uint64(before)) * powers[: len(tokens)]


def chain_step(before: U64, tokens: I32) -> U64:
    """The next hash of [n] independent texts, one token each."""
    return before * np.uint64(_A) + token_hash(tokens)


def choose(
    hashes: U64, *, fingerprints: U64, histories: U64, eos_allowed: npt.NDArray[np.bool_], vocab: FakeVocab
) -> I32:
    """[n] next tokens. Zero fingerprints and histories are plain greedy."""
    keys = mix(hashes ^ fingerprints ^ (histories * _HISTORY))
    tokens: I32 = vocab.regular[keys % np.uint64(len(vocab.regular))]
    if vocab.eos_rate > 0 and vocab.eos_token_ids:
        tokens = np.where(eos_allowed & _says_eos(keys, vocab), np.int32(vocab.eos_token_ids[0]), tokens)
    return tokens


def candidates(hashes: U64, *, vocab: FakeVocab) -> tuple[I32, F32]:
    """[n, N_TOP] token ids and their raw logprobs, best first: what greedy would choose leads."""
    keys = mix(hashes)
    n_regular = np.uint64(len(vocab.regular))
    ranks = np.arange(N_TOP, dtype=np.uint64)
    ids = vocab.regular[(keys[:, None] % n_regular + ranks) % n_regular]
    if vocab.eos_rate > 0 and vocab.eos_token_ids:
        ends = _says_eos(keys, vocab)
        ids[ends, 1:] = ids[ends, :-1]
        ids[ends, 0] = vocab.eos_token_ids[0]
    noise = (mix(keys[:, None] + ranks) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    values = -(np.float32(0.25) + ranks.astype(np.float32) * np.float32(0.5) + noise * np.float32(0.25))
    return ids, values.astype(np.float32)


def logprob_of(tokens: I32, *, ids: I32, values: F32) -> F32:
    """[n] raw logprobs of the chosen tokens, given the candidates of their positions."""
    hit = ids == tokens[:, None]
    far = np.float32(-16.0) - (token_hash(tokens) >> np.uint64(62)).astype(np.float32)
    return np.where(hit.any(axis=1), np.where(hit, values, 0).sum(axis=1), far).astype(np.float32)


def expected_tokens(
    tokens: npt.ArrayLike,
    *,
    n: int,
    vocab: FakeVocab,
    sampling: Sampling | None = None,
    n_prompt: int | None = None,
    adapter_id: str = "",
    stop_at_eos: bool = True,
) -> list[int]:
    """What an undisturbed fake worker answers: at most `n` further tokens after `tokens`, an EOS included.

    `n_prompt` of `tokens` are the original prompt (all, when None); the rest counts as output already.
    """
    known = np.ascontiguousarray(tokens, dtype=np.int32)
    n_prompt = len(known) if n_prompt is None else n_prompt
    params = FakeSampling.of(sampling if sampling is not None else Sampling())
    last = chain(root(adapter_id), known)[-1:]
    history = np.array([params.history(known, n_prompt=n_prompt)], dtype=np.uint64)
    fingerprint = np.array([params.fingerprint], dtype=np.uint64)
    answer: list[int] = []
    for n_output in range(len(known) - n_prompt, len(known) - n_prompt + n):
        allowed = np.array([n_output >= params.min_new_tokens])
        token = choose(last, fingerprints=fingerprint, histories=history, eos_allowed=allowed, vocab=vocab)
        answer.append(int(token[0]))
        if stop_at_eos and answer[-1] in vocab.eos_token_ids:
            break
        last = chain_step(last, token)
        if params.uses_history:
            history = history + token_hash(token)
    return answer


def _says_eos(keys: U64, vocab: FakeVocab) -> npt.NDArray[np.bool_]:
    uniform = (mix(keys + _GAMMA) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return uniform < vocab.eos_rate


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") | 1


@lru_cache(maxsize=32)
def _powers(n: int) -> tuple[U64, U64]:
    """A^1 … A^n and A^-1 … A^-n."""
    return _power_table(_A, n), _power_table(_A_INVERSE, n)


def _power_table(base: int, n: int) -> U64:
    table = np.full(n, base, dtype=np.uint64)
    return np.multiply.accumulate(table, dtype=np.uint64)
