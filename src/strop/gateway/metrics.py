"""What the gateway counts, in Prometheus' text format. Rollouts have their own record; this is for operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from strop.gateway.engine import Engine
    from strop.gateway.recording import Place
    from strop.sampling.sampler import Sample

_SECONDS = (0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counters of one gateway, in a registry of its own."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "strop_gateway_requests", "Requests answered", ["api", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "strop_gateway_request_seconds", "Time to answer", ["api"], buckets=_SECONDS, registry=self.registry
        )
        tokens = Counter("strop_gateway_tokens", "Tokens by what was done with them", ["kind"], registry=self.registry)
        self._read, self._new, self._cached, self._sampled = (
            tokens.labels(kind) for kind in ("prompt", "prompt_new", "prompt_cached", "sampled")
        )
        calls = Counter("strop_gateway_calls", "Model calls by where they went on", ["place"], registry=self.registry)
        self._extended, self._root, self._fork = map(calls.labels, ("extension", "root", "fork"))
        self.retries = Counter("strop_gateway_retries", "Requests recognised as repeated", registry=self.registry)
        self.failures = Counter("strop_gateway_failures", "Failures of the system", ["kind"], registry=self.registry)
        self.registry.register(_State(engine))

    def sampled(self, place: Place, prompt: list[int], sample: Sample, *, forked: bool) -> None:
        """Count one model call; `forked` if it opened a further root, its agent having rewritten its history."""
        self._read.inc(len(prompt))
        self._new.inc(len(place.prompt))
        self._cached.inc(sample.cached)
        self._sampled.inc(len(sample.tokens))
        (self._fork if forked else self._root if place.parent is None else self._extended).inc()

    def text(self) -> bytes:
        """All of it, as Prometheus scrapes it."""
        return generate_latest(self.registry)


class _State(Collector):
    """What is read at the moment of scraping."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """The gauges."""
        engine = self._engine
        for name, help_text, value in (
            ("in_flight", "Calls being sampled", engine.in_flight),
            ("attempts_open", "Attempts that are open", len(engine.attempts)),
            ("weight_version", "Version of the weights", engine.sampler.version),
            ("paused", "Whether calls wait", int(engine.paused)),
        ):
            yield GaugeMetricFamily(f"strop_gateway_{name}", help_text, value=value)
