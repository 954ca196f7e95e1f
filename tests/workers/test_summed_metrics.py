"""Metrics of several processes as one page."""

from __future__ import annotations

from kvobj.metrics import Family, Metrics, summed


def of_process(requests: int, connections: int) -> list[Family]:
    metrics = Metrics()
    metrics.counter("kvobj_s3_requests", "Requests.", ("method",)).labels("GET").inc(requests)
    metrics.gauge("kvobj_s3_connections", "Open.").set(connections)
    metrics.histogram("kvobj_s3_seconds", "Time.").observe(0.002)
    return metrics.families()


def test_counters_gauges_and_histograms_are_added_up_by_their_labels() -> None:
    page = Metrics()
    page.add_families(lambda: summed([*of_process(3, 1), *of_process(4, 2)]))
    registry = page.registry
    assert registry.get_sample_value("kvobj_s3_requests_total", {"method": "GET"}) == 7
    assert registry.get_sample_value("kvobj_s3_connections") == 3
    assert registry.get_sample_value("kvobj_s3_seconds_count") == 2
    assert registry.get_sample_value("kvobj_s3_seconds_bucket", {"le": "0.0025"}) == 2
    assert page.render().count(b"# TYPE kvobj_s3_requests_total counter") == 1


def test_of_a_process_that_ended_what_it_counted_stays_and_what_it_had_open_does_not() -> None:
    names = {family.name for family in summed(of_process(3, 1), counters_only=True)}
    assert names == {"kvobj_s3_requests", "kvobj_s3_seconds"}


def test_of_times_the_latest_counts_and_of_a_creation_the_first() -> None:
    times = [Family("kvobj_x", "", "gauge", [("kvobj_x_timestamp_seconds", {}, value)]) for value in (5.0, 9.0, 7.0)]
    assert summed(times)[0].samples == [("kvobj_x_timestamp_seconds", {}, 9.0)]
    made = [Family("kvobj_y", "", "counter", [("kvobj_y_created", {}, value)]) for value in (5.0, 3.0)]
    assert summed(made)[0].samples == [("kvobj_y_created", {}, 3.0)]
