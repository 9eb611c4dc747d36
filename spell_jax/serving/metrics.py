"""Metrics of the server in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import prometheus_client
from prometheus_client import core

from spell_jax.serving.service import ServiceState

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)  # of histograms


class ServerMetrics:
    """Counters and histograms of requests, and the numbers of the service.

    Attributes:
      requests: answered requests, by route and HTTP status.
      canceled: requests of clients that went away.
      prompt_tokens: tokens of prompts.
      cached_tokens: tokens of prompts that were taken from a shared prefix.
      sampled_tokens: tokens of answers.
      first_token_s: seconds from a request to its first tokens, of streams.
      request_s: seconds from a request to the end of its reply.
    """

    def __init__(self, read_state: Callable[[], ServiceState]):
        """Register the metrics; `read_state` returns the numbers of the service."""
        # A registry of its own: the library's default one would add the process' file system.
        self._registry = registry = prometheus_client.CollectorRegistry()
        self._read_state = read_state
        registry.register(self)
        where = {"namespace": "spell", "registry": registry}
        counter, histogram = prometheus_client.Counter, prometheus_client.Histogram
        self.requests = counter("requests", "Requests.", ("route", "status"), **where)
        self.canceled = counter("canceled_requests", "Requests of clients that left.", **where)
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.", **where)
        self.cached_tokens = counter("cached_tokens", "Prompt tokens not read again.", **where)
        self.sampled_tokens = counter("sampled_tokens", "Tokens of answers.", **where)
        buckets = {"buckets": _SECONDS}
        self.first_token_s = histogram(
            "first_token_seconds", "Seconds to a stream's first tokens.", **buckets, **where
        )
        self.request_s = histogram(
            "request_seconds", "Seconds to the end of a reply.", **buckets, **where
        )

    def collect(self) -> Iterator[core.Metric]:
        """Yield the numbers of the service, which the registry asks for."""
        state = self._read_state()
        for name, text, value in (
            ("spell_waiting_prompts", "Prompts that wait.", state.waiting),
            ("spell_running_prompts", "Prompts that are answered.", state.running),
            ("spell_used_pages", "Pages of the KV cache in use.", state.pages),
            ("spell_pages", "Pages of the KV cache.", state.all_pages),
        ):
            yield core.GaugeMetricFamily(name, text, value)
        restarts = ("spell_session_restarts", "Sessions that were given up.", state.restarts)
        yield core.CounterMetricFamily(*restarts)

    def text(self) -> bytes:
        """Return all metrics as text."""
        return prometheus_client.generate_latest(self._registry)
