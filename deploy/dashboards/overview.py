"""Is the service well, and what do its users see?"""

from __future__ import annotations

from deploy.dashboards.panel import Dashboard, Query, Row, gauge, plot, quantiles, rate, stat

_KV = f"{gauge('quire_kv_blocks_used')} / {gauge('quire_kv_blocks')}"
_ASKED = rate("quire_cache_asked_tokens_total")

OVERVIEW = Dashboard(
    uid="quire-overview",
    title="Quire: overview",
    text="What users see: requests, latency, errors; and how full the service is.",
    rows=(
        Row(
            title="Now",
            panels=(
                stat(
                    "Ready",
                    "1 when requests are served.",
                    Query('min (quire_ready{instance=~"$instance"})'),
                    red_below=1,
                ),
                stat(
                    "Workers live",
                    "Of those in the address list.",
                    Query(gauge("quire_replicas_live"), "live"),
                    Query(gauge("quire_replicas_known"), "known"),
                    red_below=1,
                ),
                stat(
                    "Requests",
                    "Accepted per second; each choice of `n` counts.",
                    Query(rate("quire_requests_total")),
                    unit="reqps",
                ),
                stat(
                    "Output tokens",
                    "Sampled for requests, per second.",
                    Query(rate("quire_output_tokens_total")),
                ),
                stat(
                    "Waiting",
                    "Requests in the queue.",
                    Query(gauge("quire_requests_waiting")),
                ),
                stat(
                    "KV cache in use",
                    "Share of the blocks that running requests hold.",
                    Query(_KV),
                    unit="percentunit",
                    red_from=0.95,
                ),
            ),
        ),
        Row(
            title="Latency",
            panels=(
                plot(
                    "Time to first token",
                    "From a request's arrival at the scheduler to its first token.",
                    *quantiles("quire_time_to_first_token_seconds", (0.5, 0.95, 0.99)),
                    unit="s",
                ),
                plot(
                    "Between tokens",
                    "Between two tokens of one answer.",
                    *quantiles("quire_inter_token_seconds", (0.5, 0.95, 0.99)),
                    unit="s",
                ),
                plot(
                    "Queue time",
                    "From arrival until a worker takes the request. Add workers when it grows.",
                    *quantiles("quire_request_queue_seconds", (0.5, 0.95, 0.99)),
                    unit="s",
                ),
                plot(
                    "Whole request",
                    "From arrival to the last token.",
                    *quantiles("quire_request_seconds", (0.5, 0.95, 0.99)),
                    unit="s",
                ),
                plot(
                    "Prefill",
                    "From meeting a worker to the first token.",
                    *quantiles("quire_request_prefill_seconds", (0.5, 0.95)),
                    unit="s",
                ),
                plot(
                    "Decode",
                    "From the first token to the last.",
                    *quantiles("quire_request_decode_seconds", (0.5, 0.95)),
                    unit="s",
                ),
            ),
        ),
        Row(
            title="Traffic",
            panels=(
                plot(
                    "Ends of requests",
                    "stop: the model ended; length: max_tokens; cancelled: the client went away.",
                    Query(rate("quire_requests_finished_total", by="reason"), "{{reason}}"),
                    Query(f"{rate('quire_requests_failed_total')} or vector(0)", "failed"),
                    unit="reqps",
                    stacked=True,
                ),
                plot(
                    "Refused and failed",
                    "429: the queue is full. The errors of accepted requests, by code.",
                    Query(f"{rate('quire_requests_refused_total')} or vector(0)", "refused"),
                    Query(f"{rate('quire_requests_failed_total')} or vector(0)", "failed"),
                    unit="reqps",
                ),
                plot(
                    "HTTP answers",
                    "By status, as one API process counts them; with several, each scrape meets one.",
                    Query(
                        rate("quire_api_requests_total", by="status", labels='route=~"/v1/.*"'),
                        "{{status}}",
                    ),
                    unit="reqps",
                    stacked=True,
                ),
                plot(
                    "Requests in the server",
                    "Waiting and running.",
                    Query(gauge("quire_requests_waiting"), "waiting"),
                    Query(gauge("quire_requests_running"), "running"),
                    stacked=True,
                ),
                plot(
                    "Tokens",
                    "Prompt tokens computed, prompt tokens found in the cache, tokens sampled.",
                    Query(rate("quire_prefill_tokens_total"), "prompt"),
                    Query(rate("quire_cache_hit_tokens_total"), "from the cache"),
                    Query(rate("quire_output_tokens_total"), "output"),
                ),
                plot(
                    "Prefix cache",
                    "Share of the prompt tokens that were found computed.",
                    Query(f"{rate('quire_cache_hit_tokens_total')} / clamp_min({_ASKED}, 1e-9)", "found"),
                    unit="percentunit",
                ),
            ),
        ),
    ),
)
