"""What the router says of its replicas while it serves: their counters, devices and states."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

import httpx

from bench.server import ServerError

_LINE = re.compile(
    r'^(quire_replica_(?:output|prefill)_tokens)_total\{replica="([^"]+)"\} (\S+)$', re.MULTILINE
)
_LIVE = re.compile(r"^quire_replicas_live (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Counts:
    """At one moment, by the replica's address. A replica's counters begin at 0 when it is connected anew."""

    at_s: float
    n_live: int
    output: dict[str, float]
    prefill: dict[str, float]

    def since(self, before: Counts) -> dict[str, tuple[float, float]]:
        """(prompt tokens computed, tokens sampled) by replica."""
        return {
            replica: (
                grown(before.prefill.get(replica, 0.0), self.prefill.get(replica, 0.0)),
                grown(before.output.get(replica, 0.0), self.output[replica]),
            )
            for replica in self.output
        }


def grown(before: float, now: float) -> float:
    """By how much a counter grew that may have begun anew."""
    return now - before if now >= before else now


def parse_counts(text: str, *, at_s: float) -> Counts:
    """From Prometheus' text."""
    found: dict[str, dict[str, float]] = {
        "quire_replica_output_tokens": {},
        "quire_replica_prefill_tokens": {},
    }
    for name, replica, value in _LINE.findall(text):
        found[name][replica] = float(value)
    live = _LIVE.search(text)
    return Counts(
        at_s=at_s,
        n_live=int(float(live.group(1))) if live else 0,
        output=found["quire_replica_output_tokens"],
        prefill=found["quire_replica_prefill_tokens"],
    )


class Observer:
    """Asks one router. Raises ServerError when it does not answer."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=30.0)

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

    def counts(self) -> Counts:
        text = self._get("/metrics").text
        return parse_counts(text, at_s=time.perf_counter())

    def replicas(self) -> list[dict[str, Any]]:
        """Address, device and state of each."""
        wanted = ("address", "state", "worker_id", "device", "attention", "n_blocks", "block_size")
        entries = self._get("/admin/state").json()["replicas"]
        return [{key: entry[key] for key in wanted if key in entry} for entry in entries]

    def _get(self, path: str) -> httpx.Response:
        try:
            return self._http.get(path).raise_for_status()
        except httpx.HTTPError as error:
            raise ServerError(f"{path} can't be read: {error}") from error
