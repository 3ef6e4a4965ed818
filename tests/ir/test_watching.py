"""The watch over collectives that do not hold the host, with stand-ins for a device's events."""

from __future__ import annotations

import time

import pytest
import torch

from latentscan.ir.ops import watching
from latentscan.ir.ops.waiting import alias, late, wait
from latentscan.ir.ops.watching import Watch

C10D = torch.ops._c10d_functional


class Event:
    def __init__(self, done=False):
        self.done = done

    def query(self):
        return self.done


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def watched():
    told, clock = [], Clock()
    return Watch(10.0, lambda group, what: f"{what} of {group}", tell=told.append, clock=clock), told, clock


def test_what_comes_in_time_is_not_told(watched):
    watch, told, clock = watched
    for step in range(20):  # 100 s in all, but something moves every 5 s
        event = Event()
        watch.add(event, "0@mlp", "all_reduce", threaded=False)
        clock.now += 5.0
        assert watch.look()
        event.done = True
        assert not watch.look(), step
    assert told == []


def test_what_does_not_come_is_told_once_before_the_time_out(watched):
    watch, told, clock = watched
    first, later = Event(), Event()
    clock.now = 100.0
    watch.add(Event(done=True), "0@embed", "all_gather", threaded=False)
    watch.add(first, "0@layers.1.mlp", "all_reduce", threaded=False)
    watch.add(later, "0@layers.2.mlp", "all_reduce", threaded=False)
    clock.now = 107.0
    assert watch.look() and told == []
    clock.now = 114.9  # 7.9 s after the first one was seen done
    assert watch.look() and told == []
    clock.now = 115.1
    assert watch.look() and watch.look()
    assert told == ["latentscan: for 8 s of 10 nothing moved, 1 waits behind it: all_reduce of 0@layers.1.mlp"]
    first.done = True
    watch.look()
    clock.now = 130.0
    watch.look()
    assert len(told) == 2 and "layers.2" in told[1] and "0 waits" in told[1]


@pytest.mark.parametrize(("seconds", "from_then"), [(600.0, 475.0), (20.0, 11.0), (6.0, 3.0)])
def test_it_is_told_by_the_time_that_the_others_answer(seconds, from_then):
    """With NCCL, 20 s: asked at 16 s the answer came at 21 s, after the watchdog's."""
    told, clock = [], Clock()
    watch = Watch(seconds, lambda group, what: what, tell=told.append, clock=clock, answer=5.0)
    watch.add(Event(), "0", "all_reduce", threaded=False)
    clock.now = from_then - 0.1
    assert watch.look() and not told
    clock.now = from_then
    assert watch.look() and told


def test_many_silent_ranks_take_no_longer_than_the_answer():
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend)

    dist.init_process_group("fake", rank=1, world_size=64, store=dist.HashStore())
    try:
        began = time.monotonic()
        text = late(dist.group.WORLD.group_name, "all_reduce", 0.2)
        assert time.monotonic() - began < 2.0  # 0.05 s more for each would be 3 s
        assert text.count("gave no sign:") == 63
    finally:
        dist.destroy_process_group()


def test_a_thread_looks_while_something_is_under_way():
    told = []
    watch = Watch(0.4, lambda group, what: what, tell=told.append)
    event = Event()
    watch.add(event, "0", "all_reduce")
    until = time.monotonic() + 20
    while not told and time.monotonic() < until:
        time.sleep(0.02)
    assert len(told) == 1
    first = watch._thread
    assert first is not None
    event.done = True
    first.join(20)
    assert not first.is_alive() and watch._thread is None
    watch.add(Event(done=True), "0", "all_reduce")
    second = watch._thread
    assert second is not None and second is not first
    second.join(20)
    assert watch._thread is None


def test_a_wait_on_a_device_is_watched_under_its_module(monkeypatch):
    """Through a graph's own wait, on a group of two that sends nothing; what is on the CPU holds the host instead."""
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend)

    dist.init_process_group("fake", rank=1, world_size=2, store=dist.HashStore())
    try:
        name = dist.group.WORLD.group_name
        group = alias(name, "model.layers.1.mlp")
        told = []
        watch = Watch(1.0, late, tell=told.append, clock=(clock := Clock()))
        add = watch.add
        monkeypatch.setattr(watch, "add", lambda *a: add(*a, threaded=False))
        monkeypatch.setitem(watching._WATCHES, name, watch)
        wait(C10D.all_reduce(torch.ones(2), "sum", group), group, "all_reduce")
        assert not watch._open
        monkeypatch.setattr(watching, "_on_host", lambda x: False)
        monkeypatch.setattr(watching, "event_of", lambda x: Event())
        monkeypatch.setattr("latentscan.ir.ops.waiting.ANSWER", 0.1)
        wait(C10D.all_reduce(torch.ones(2), "sum", group), group, "all_reduce")
        clock.now = 2.0
        assert watch.look()
        assert "rank 1 waited at all_reduce for model.layers.1.mlp: the others" in told[0]
        assert "rank 0 gave no sign" in told[0]
    finally:
        dist.destroy_process_group()


def test_a_watch_that_fails_stops_no_wait(monkeypatch):
    watch = Watch(1.0, late)
    monkeypatch.setitem(watching._WATCHES, "g", watch)
    monkeypatch.setattr(watching, "_on_host", lambda x: False)

    def broken(x):
        raise RuntimeError("no such device")

    monkeypatch.setattr(watching, "event_of", broken)
    watching.waited(torch.ones(1), "g", "g", "all_reduce")
    assert not watch._open
