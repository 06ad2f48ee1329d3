"""Prometheus metrics of a follower, on vLLM's own ``/metrics``."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Metrics:
    """The numbers of one follower.

    Args:
        registry: where they are shown; None keeps them to this object.
    """

    def __init__(self, registry: CollectorRegistry | None = REGISTRY) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"vllm_delta_{name}", text, registry=registry, multiprocess_mode="max")

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"vllm_delta_{name}", text, labels, registry=registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(
                f"vllm_delta_{name}_seconds", text, registry=registry, buckets=_SECONDS
            )

        self.version = gauge("version", "Number of the version that is served, -1 for none")
        self.lag_versions = gauge("lag_versions", "Published versions that are not served yet")
        self.lag_s = gauge("lag_seconds", "Age of the oldest published version not served yet")
        self.kv_age = gauge("oldest_kv_versions", "Versions since the oldest KV in use began")
        self.spacing_s = gauge("spacing_seconds", "Wait that the spacing rules ask for")
        self.recompute_share = gauge(
            "recompute_share", "Share of time that went into recomputing KV since the last commit"
        )
        self.fenced = gauge("fenced", "1 while the engine serves nothing for want of good weights")
        self.n_bytes = counter("payload_bytes", "Payload bytes of committed versions")
        self.commits = counter("commits", "Pauses that committed something")
        self.versions = counter("versions", "Versions committed")
        self.skipped = counter("skipped_versions", "Versions committed but never served")
        self.rollbacks = counter("rollbacks", "Versions rolled back")
        self.scans = counter("scans", "Full scans of the resident weights")
        self.errors = counter("errors", "Errors by kind", "kind")
        self.stage_s = seconds("stage", "From seeing a version to having it staged on every rank")
        self.check_s = seconds("check", "Checking a staged version on every rank")
        self.apply_s = seconds("apply", "Applying under the pause, every rank, all versions")
        self.pause_s = seconds("pause", "How long a commit kept the engine from stepping")
        self.version.set(-1)
