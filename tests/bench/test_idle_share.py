from __future__ import annotations

from bench.serve import idle_share_of

METRICS = """\
# HELP quire_worker_steady_seconds_total Time that decode steps behind decode steps took.
quire_worker_steady_seconds_total{replica="a"} 6.0
quire_worker_steady_seconds_total{replica="b"} 3.0
quire_worker_steady_idle_seconds_total{replica="a"} 1.0
quire_worker_steady_idle_seconds_total{replica="b"} 0.0
quire_worker_idle_seconds{replica="a"} 0.5
"""


def test_the_share_is_of_all_replicas_together() -> None:
    assert idle_share_of(METRICS) == 0.1


def test_another_server_has_no_such_metric() -> None:
    assert idle_share_of("vllm:num_requests_running 1.0\n") is None
