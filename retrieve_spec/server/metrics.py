"""Prometheus metrics of finished requests and completions."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from retrieve_spec.server.jobs import Completion, Task

_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.25, 0.375, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_TOKENS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)


class Metrics:
    """The counters of one server, in a registry of its own."""

    def __init__(self, queue_length: Callable[[], int], begun: Callable[[], int] | None = None) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        p = "retrieve_spec_"
        self._requests = Counter(p + "requests", "Requests by path and status.", ["path", "status"], registry=r)
        self._latency = Histogram(
            p + "request_seconds", "Time to answer, by path.", ["path"], buckets=_SECONDS, registry=r
        )
        self._overhead = Histogram(
            p + "overhead_seconds", "Time spent outside the model, by path.", ["path"], buckets=_SECONDS, registry=r
        )
        self._per_pass = Histogram(
            p + "tokens_per_pass", "Tokens emitted per forward pass.", buckets=_TOKENS, registry=r
        )
        self._emitted = Counter(p + "tokens_emitted", "Tokens emitted.", registry=r)
        self._passes = Counter(p + "passes", "Forward passes spent on decoding.", registry=r)
        self._drafted = Counter(p + "draft_nodes", "Draft nodes verified.", registry=r)
        self._accepted = Counter(p + "accepted_tokens", "Accepted draft tokens by source.", ["source"], registry=r)
        self._prompt = Counter(p + "prompt_tokens", "Prompt tokens by how they were read.", ["read"], registry=r)
        self._first = Histogram(
            p + "first_token_seconds", "Time to the first token, by what asked.", ["kind"], buckets=_SECONDS, registry=r
        )
        self._deadlines = Counter(p + "deadlines", "Completions that a deadline ended.", registry=r)
        self._outcomes = Counter(p + "completions", "Completions by outcome.", ["outcome"], registry=r)
        self._cancelled = Counter(p + "cancellations", "Requests given up, by reason.", ["reason"], registry=r)
        self._after = Counter(p + "passes_after_cancel", "Passes spent after a client had gone.", registry=r)
        Gauge(p + "queue_length", "Requests waiting.", registry=r).set_function(queue_length)
        if begun is not None:
            Gauge(p + "running", "Requests under way.", registry=r).set_function(begun)

    def request(self, path: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        self._requests.labels(path, str(status)).inc()
        self._latency.labels(path).observe(seconds)

    def overhead(self, path: str, seconds: float) -> None:
        """Count time a request spent outside the model and outside the queue."""
        self._overhead.labels(path).observe(seconds)

    def completion(self, task: Task, done: Completion) -> None:
        """Count a finished task."""
        self._outcomes.labels(done.outcome).inc()
        if done.outcome in ("cancelled", "superseded"):
            self._cancelled.labels("disconnect" if done.outcome == "cancelled" else "superseded").inc()
        self._after.inc(done.passes_after_cancel)
        self._prompt.labels("cache").inc(done.cached_tokens)
        if done.outcome == "done":
            self._prompt.labels("model").inc(max(0, done.prompt_tokens - done.cached_tokens))
        if done.token_ids:
            kind = "typing" if task.typing else "other"
            self._first.labels(kind).observe(done.first_s)
        self._deadlines.inc(done.deadline_hit)
        figures = done.figures
        self._emitted.inc(len(done.token_ids))
        self._passes.inc(figures.passes)
        self._drafted.inc(figures.drafted)
        for source, count in figures.accepted_by_source.items():
            self._accepted.labels(source).inc(count)
        if figures.passes:
            self._per_pass.observe(len(done.token_ids) / figures.passes)

    def figures(self) -> dict[str, float]:
        """What a page shows: tokens per pass, accepted draft tokens by source, requests that wait and are under way."""
        values = {
            (sample.name.removeprefix("retrieve_spec_"), sample.labels.get("source", "")): sample.value
            for family in self.registry.collect()
            for sample in family.samples
        }
        passes = values[("passes_total", "")]
        figures = {"Tokens per pass": values[("tokens_emitted_total", "")] / passes if passes else 0.0}
        figures |= {f"Accepted from {of}": n for (name, of), n in values.items() if name == "accepted_tokens_total"}
        return figures | {
            "Requests waiting": values[("queue_length", "")],
            "Under way": values.get(("running", ""), 0.0),
        }

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)
