"""The dashboards: sections of panels, each with its queries."""

from __future__ import annotations

from prejit.runtime.observe.grafana import Dashboard, Panel
from prejit.runtime.observe.panels import (
    ANSWERS,
    BETWEEN_TOKENS,
    BUSY,
    CACHE_USAGE,
    CALLS,
    ERRORS,
    FALLBACKS,
    FIRST_TOKEN,
    GENERATIONS,
    HERE,
    HITS,
    HOST_MEMORY,
    MODEL,
    NAME,
    NAN,
    PROCESS,
    PROGRAM,
    QUEUE,
    REQUESTS,
    STATE,
    TOKENS,
    VERSIONS,
    WAITED,
    WHOLE,
    burn,
    gauge,
    quantiles,
    rate,
    share,
)

OVERVIEW = Dashboard(
    "prejit-overview",
    "prejit: overview",
    (
        ("Load", (TOKENS, QUEUE, REQUESTS)),
        (
            "Latency",
            (
                FIRST_TOKEN,
                BETWEEN_TOKENS,
                WHOLE,
            ),
        ),
        ("Capacity", (BUSY, CACHE_USAGE, HITS, HOST_MEMORY, ERRORS, VERSIONS)),
    ),
)
"""Is the service well, and how much does it do."""

ON_CALL = Dashboard(
    "prejit-on-call",
    "prejit: on call",
    (
        (
            "Alerts",
            (
                Panel(
                    "Alerts",
                    "Each alert links to its runbook.",
                    "short",
                    (('ALERTS{alertname=~"Prejit.*", job=~"$job"}', "{{alertname}}"),),
                    kind="table",
                ),
                STATE,
                Panel(
                    "Servers that answer Prometheus",
                    "A server that is down, or hangs, is missing here.",
                    "short",
                    ((f"sum by (job) (up{{{PROCESS}}})", "{{job}}"),),
                ),
            ),
        ),
        (
            "Error budgets",
            (
                burn(
                    "model:prejit_requests_failed",
                    "Failed requests",
                    "The budget is 0.1 %. The fast alert fires at 1.44 % over an hour.",
                ),
                burn(
                    "model:prejit_first_token_slow",
                    "First tokens after 2.5 s",
                    "The budget is 1 %. The fast alert fires at 14.4 % over an hour.",
                ),
                burn(
                    "model:prejit_call_slow",
                    "Encodings and calls after 2.5 s",
                    "The budget is 1 %. The fast alert fires at 14.4 % over an hour.",
                ),
                REQUESTS,
            ),
        ),
        (
            "Causes",
            (ANSWERS, QUEUE, FIRST_TOKEN, BUSY, WAITED, FALLBACKS, NAN, HOST_MEMORY, TOKENS),
        ),
    ),
)
"""What is broken, and where to look first."""

DEBUG = Dashboard(
    "prejit-debug",
    "prejit: debug",
    (
        (
            "Programs and starts",
            (
                Panel(
                    "Programs by how they became ready",
                    "Under AOT all are loaded or unused. compiled and compiling cost requests their time.",
                    "short",
                    (
                        (
                            gauge("prejit_programs", "model_name, source"),
                            "{{model_name}} {{source}}",
                        ),
                    ),
                ),
                Panel(
                    "Time spent compiling",
                    "Sum over all programs since the start of each server.",
                    "s",
                    ((gauge("prejit_compile_seconds_total", "instance, model_name"), HERE),),
                ),
                Panel(
                    "Parts of a start",
                    "From the start of the process to its first result, the median of all servers.",
                    "s",
                    (
                        (
                            "quantile by (model_name, part) (0.5, "
                            f"prejit_start_seconds{{{MODEL}}})",
                            "{{model_name}} {{part}}",
                        ),
                    ),
                ),
                WAITED,
                FALLBACKS,
                Panel(
                    "Machines that match their target",
                    "0: this server compiles all of its programs itself.",
                    "short",
                    ((gauge("prejit_target_matched", "instance, model_name", "min"), HERE),),
                ),
            ),
        ),
        (
            "Batches",
            (
                Panel(
                    "Filled rows of decode buckets",
                    "Low while the queue is long: requests do not get into the batch.",
                    "percentunit",
                    (
                        (
                            f"{rate('prejit_rows_total', more=GENERATIONS)} / ("
                            f"{rate('prejit_rows_total', more=GENERATIONS)} + "
                            f"{rate('prejit_padded_rows_total', more=GENERATIONS)})",
                            NAME,
                        ),
                    ),
                ),
                Panel(
                    "Padding",
                    "The share of computed positions that belonged to no request.",
                    "percentunit",
                    (
                        (
                            "1 - "
                            + share(
                                "prejit_useful_positions_total",
                                "prejit_computed_positions_total",
                                more=GENERATIONS,
                            ),
                            NAME,
                        ),
                    ),
                ),
                Panel(
                    "Steps a second",
                    "Steps compute prompts, decode, or both. Fewer at the same load: each takes longer.",
                    "ops",
                    ((rate("prejit_runs_total", more=GENERATIONS), NAME),),
                ),
                QUEUE,
            ),
        ),
        (
            "Parts of a request",
            (
                Panel(
                    "Time in the queue",
                    "Requests without a free slot, or without memory for their cache.",
                    "s",
                    quantiles("vllm:request_queue_time_seconds"),
                ),
                Panel(
                    "Time of prefill",
                    "It follows the length of prompts and the share that is cached.",
                    "s",
                    quantiles("vllm:request_prefill_time_seconds"),
                ),
                Panel(
                    "Time of decode",
                    "It follows the number of new tokens and the rows of the batch.",
                    "s",
                    quantiles("vllm:request_decode_time_seconds"),
                ),
                Panel(
                    "Tokens of a prompt",
                    "A new kind of client shows here first.",
                    "short",
                    quantiles("vllm:request_prompt_tokens"),
                ),
                Panel(
                    "New tokens of a request",
                    "Few, with the reason length: clients ask for too few.",
                    "short",
                    quantiles("vllm:request_generation_tokens"),
                ),
                HITS,
            ),
        ),
        (
            "Memory and process",
            (
                Panel(
                    "Memory of caches",
                    "A request waits if its cache would exceed the budget.",
                    "bytes",
                    (
                        (gauge("prejit_kv_cache_bytes", "instance, model_name"), f"{HERE} KV"),
                        (
                            gauge("prejit_kv_cache_budget_bytes", "instance, model_name"),
                            f"{HERE} KV budget",
                        ),
                        (
                            gauge("prejit_prefix_cache_bytes", "instance, model_name"),
                            f"{HERE} prefixes",
                        ),
                        (
                            gauge("prejit_prefix_cache_budget_bytes", "instance, model_name"),
                            f"{HERE} prefix budget",
                        ),
                    ),
                ),
                Panel(
                    "Peak device memory",
                    "Weights, caches and temporary arrays. Absent on CPUs.",
                    "bytes",
                    ((gauge("prejit_device_memory_bytes", "instance, model_name", "max"), HERE),),
                ),
                HOST_MEMORY,
                Panel(
                    "CPUs in use",
                    "CPU seconds a second of the process.",
                    "short",
                    (
                        (
                            f"rate(process_cpu_seconds_total{{{PROCESS}}}[$__rate_interval])",
                            "{{instance}}",
                        ),
                    ),
                ),
                Panel(
                    "Open files",
                    "Connections and mapped files. Steady growth is a leak.",
                    "short",
                    ((f"process_open_fds{{{PROCESS}}}", "{{instance}}"),),
                ),
                NAN,
            ),
        ),
    ),
)
"""Why it is slow: programs, batches, parts of requests, memory."""

ENCODERS = Dashboard(
    "prejit-calls",
    "prejit: encoders and functions",
    (
        (
            "Load",
            (
                Panel(
                    "Calls by program",
                    "Encodings, and calls of each function, that have a result.",
                    "reqps",
                    (
                        (
                            rate(
                                "prejit_requests_total",
                                "model_name, program",
                                f'{CALLS}, reason="done"',
                            ),
                            PROGRAM,
                        ),
                    ),
                ),
                Panel(
                    "Rows a second",
                    "Sentences of an encoder, and rows along the batch axis of a function.",
                    "short",
                    ((rate("prejit_rows_total", "model_name, program", CALLS), PROGRAM),),
                ),
                Panel(
                    "Calls running and waiting",
                    "A program is saturated if its calls wait while it is busy all the time.",
                    "short",
                    tuple(
                        (
                            gauge(f"prejit_requests_{state}", "model_name, program", more=CALLS),
                            f"{PROGRAM} {state}",
                        )
                        for state in ("running", "waiting")
                    ),
                ),
                REQUESTS,
                BUSY,
                ANSWERS,
            ),
        ),
        (
            "Latency",
            (
                *(
                    Panel(
                        title,
                        description,
                        "s",
                        quantiles(metric, "model_name, program", PROGRAM, CALLS),
                    )
                    for title, description, metric in (
                        (
                            "Time of a call",
                            "From the call to its result: the queue, and the runs that have its rows.",
                            "prejit_request_seconds",
                        ),
                        (
                            "Time of a call in the queue",
                            "It grows before the queue is full. Add replicas if the device is busy.",
                            "prejit_request_queue_seconds",
                        ),
                        (
                            "Time of a call in the program",
                            "It follows the bucket. Many rows of one call take several runs.",
                            "prejit_request_run_seconds",
                        ),
                    )
                ),
                Panel(
                    "Time of an answer",
                    "p95 of requests over HTTP: reading, tokenizing and writing included.",
                    "s",
                    (
                        (
                            "histogram_quantile(0.95, sum by (route, le) "
                            f"(rate(prejit_http_request_seconds_bucket{{{PROCESS}}}[$__rate_interval])))",
                            "{{route}}",
                        ),
                    ),
                ),
            ),
        ),
        (
            "Batches",
            (
                Panel(
                    "Rows of a run",
                    "Rows of callers in one run: 1 under load means that callers do not share runs.",
                    "short",
                    (
                        (
                            share(
                                "prejit_rows_total",
                                "prejit_runs_total",
                                "model_name, program",
                                CALLS,
                            ),
                            PROGRAM,
                        ),
                    ),
                ),
                Panel(
                    "Padded rows a second",
                    "Rows that only filled the bucket. Many of them: add a bucket of fewer rows.",
                    "short",
                    ((rate("prejit_padded_rows_total", "model_name, program", CALLS), PROGRAM),),
                ),
                Panel(
                    "Padding of sentences",
                    "The share of an encoder's positions without a token. Much of it: add a shorter bucket.",
                    "percentunit",
                    (
                        (
                            "1 - "
                            + share(
                                "prejit_useful_positions_total",
                                "prejit_computed_positions_total",
                                more=', kind="encode"',
                            ),
                            NAME,
                        ),
                    ),
                ),
            ),
        ),
    ),
)
"""How encoders and functions do: their calls, the parts of each, and how well callers share runs."""

DASHBOARDS = (OVERVIEW, ON_CALL, ENCODERS, DEBUG)
