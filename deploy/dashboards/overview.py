"""Is the service well, and what do its users see?"""

from __future__ import annotations

from deploy.dashboards.panel import Dashboard, Panel, Query, Row, gauge, quantiles, rate

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
                Panel(
                    title="Ready",
                    text="1 when requests are served.",
                    unit="short",
                    kind="stat",
                    width=4,
                    height=4,
                    red_below=1,
                    queries=(Query('min (quire_ready{instance=~"$instance"})'),),
                ),
                Panel(
                    title="Workers live",
                    text="Of those in the address list.",
                    unit="short",
                    kind="stat",
                    width=4,
                    height=4,
                    red_below=1,
                    queries=(
                        Query(gauge("quire_replicas_live"), "live"),
                        Query(gauge("quire_replicas_known"), "known"),
                    ),
                ),
                Panel(
                    title="Requests",
                    text="Accepted per second; each choice of `n` counts.",
                    unit="reqps",
                    kind="stat",
                    width=4,
                    height=4,
                    queries=(Query(rate("quire_requests_total")),),
                ),
                Panel(
                    title="Output tokens",
                    text="Sampled for requests, per second.",
                    unit="short",
                    kind="stat",
                    width=4,
                    height=4,
                    queries=(Query(rate("quire_output_tokens_total")),),
                ),
                Panel(
                    title="Waiting",
                    text="Requests in the queue.",
                    unit="short",
                    kind="stat",
                    width=4,
                    height=4,
                    queries=(Query(gauge("quire_requests_waiting")),),
                ),
                Panel(
                    title="KV cache in use",
                    text="Share of the blocks that running requests hold.",
                    unit="percentunit",
                    kind="stat",
                    width=4,
                    height=4,
                    red_from=0.95,
                    queries=(Query(_KV),),
                ),
            ),
        ),
        Row(
            title="Latency",
            panels=(
                Panel(
                    title="Time to first token",
                    text="From a request's arrival at the scheduler to its first token.",
                    unit="s",
                    queries=quantiles("quire_time_to_first_token_seconds", (0.5, 0.95, 0.99)),
                ),
                Panel(
                    title="Between tokens",
                    text="Between two tokens of one answer.",
                    unit="s",
                    queries=quantiles("quire_inter_token_seconds", (0.5, 0.95, 0.99)),
                ),
                Panel(
                    title="Queue time",
                    text="From arrival until a worker takes the request. Add workers when it grows.",
                    unit="s",
                    queries=quantiles("quire_request_queue_seconds", (0.5, 0.95, 0.99)),
                ),
                Panel(
                    title="Whole request",
                    text="From arrival to the last token.",
                    unit="s",
                    queries=quantiles("quire_request_seconds", (0.5, 0.95, 0.99)),
                ),
                Panel(
                    title="Prefill",
                    text="From meeting a worker to the first token.",
                    unit="s",
                    queries=quantiles("quire_request_prefill_seconds", (0.5, 0.95)),
                ),
                Panel(
                    title="Decode",
                    text="From the first token to the last.",
                    unit="s",
                    queries=quantiles("quire_request_decode_seconds", (0.5, 0.95)),
                ),
            ),
        ),
        Row(
            title="Traffic",
            panels=(
                Panel(
                    title="Ends of requests",
                    text="stop: the model ended; length: max_tokens; cancelled: the client went away.",
                    unit="reqps",
                    stacked=True,
                    queries=(
                        Query(rate("quire_requests_finished_total", by="reason"), "{{reason}}"),
                        Query(f"{rate('quire_requests_failed_total')} or vector(0)", "failed"),
                    ),
                ),
                Panel(
                    title="Refused and failed",
                    text="429: the queue is full. The errors of accepted requests, by code.",
                    unit="reqps",
                    queries=(
                        Query(f"{rate('quire_requests_refused_total')} or vector(0)", "refused"),
                        Query(f"{rate('quire_requests_failed_total')} or vector(0)", "failed"),
                    ),
                ),
                Panel(
                    title="HTTP answers",
                    text="By status, as one API process counts them; with several, each scrape meets one.",
                    unit="reqps",
                    stacked=True,
                    queries=(
                        Query(
                            rate("quire_api_requests_total", by="status", labels='route=~"/v1/.*"'),
                            "{{status}}",
                        ),
                    ),
                ),
                Panel(
                    title="Requests in the server",
                    text="Waiting and running.",
                    unit="short",
                    stacked=True,
                    queries=(
                        Query(gauge("quire_requests_waiting"), "waiting"),
                        Query(gauge("quire_requests_running"), "running"),
                    ),
                ),
                Panel(
                    title="Tokens",
                    text="Prompt tokens computed, prompt tokens found in the cache, tokens sampled.",
                    unit="short",
                    queries=(
                        Query(rate("quire_prefill_tokens_total"), "prompt"),
                        Query(rate("quire_cache_hit_tokens_total"), "from the cache"),
                        Query(rate("quire_output_tokens_total"), "output"),
                    ),
                ),
                Panel(
                    title="Prefix cache",
                    text="Share of the prompt tokens that were found computed.",
                    unit="percentunit",
                    queries=(
                        Query(f"{rate('quire_cache_hit_tokens_total')} / clamp_min({_ASKED}, 1e-9)", "found"),
                    ),
                ),
            ),
        ),
    ),
)
