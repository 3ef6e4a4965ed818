"""A watch over collectives whose waits do not hold the host: on a GPU or NPU a wait is an entry in a stream.

There torch's own watchdog ends a process whose collective is not done in time, and names the operation alone. Behind
each wait a watched group records an event; a thread looks how far the device came, and where nothing moved for most of
the time-out it says, before the watchdog ends the process, who waits for what and where the others are.

Waits that Inductor's calls make are not seen. One watch a process group, as groups are the process's; it is made where
a time-out is given (``wrap(..., timeout=)``).
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_EARLY = 0.8  # of the time-out: the message is out by then, before the watchdog's end
_WATCHES: dict[str, Watch] = {}


class Watch:
    """What one process group has under way on a device.

    Args:
        seconds: the group's time-out.
        answer: seconds that ``say`` may take, which are begun earlier; not before half of the time-out.
        say: gives the message of a collective that is not done, (group, what) -> text.
        tell, clock: where the message goes, and the time; by default standard error and the monotonic clock.
    """

    def __init__(
        self, seconds: float, say: Callable[[str, str], str], *, tell: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic, answer: float = 0.0,
    ) -> None:  # fmt: skip
        self._patience = max(0.5 * seconds, _EARLY * seconds - answer)
        self.seconds, self._say, self._tell, self._clock = seconds, say, tell or _print, clock
        self._open: deque[tuple[Any, str, str]] = deque()
        self._moved = clock()
        self._said = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, event: Any, group: str, what: str, *, threaded: bool = True) -> None:
        """A wait of which ``event.query()`` tells whether the device is past it."""
        with self._lock:
            if not self._open:
                self._moved = self._clock()
            self._open.append((event, group, what))
            if threaded and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="latentscan-watch", daemon=True)
                self._thread.start()

    def look(self) -> bool:
        """Forget what is done; say, once, what is not done in time. Whether anything is under way."""
        with self._lock:
            while self._open and self._open[0][0].query():
                self._open.popleft()
                self._moved, self._said = self._clock(), False
            if not self._open:
                self._thread = None  # it ends now: what is added next starts another
                return False
            stuck = self._clock() - self._moved
            if stuck < self._patience or self._said:
                return True
            self._said = True
            _, group, what = self._open[0]
            behind = len(self._open) - 1
        text = self._say(group, what)
        self._tell(
            f"latentscan: for {stuck:.0f} s of {self.seconds:.0f} nothing moved, {behind} waits behind it: {text}"
        )
        return True

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # a device that is gone: its own error says more, and nothing is watched
            while True:
                time.sleep(min(1.0, self.seconds / 20))
                if not self.look():
                    return


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def watch(group: str, seconds: float, say: Callable[[str, str], str], answer: float) -> None:
    """Watch a group, by its own name, from now on."""
    _WATCHES[group] = Watch(seconds, say, answer=answer)


def waited(x: Tensor, plain: str, group: str, what: str) -> None:
    """After a wait for ``x`` was put into its device's stream. ``plain``: the group's own name."""
    found = _WATCHES.get(plain)
    if found is None or _on_host(x):
        return
    with contextlib.suppress(Exception):  # a stream that is being captured takes no event that is asked outside
        found.add(event_of(x), group, what)


def _on_host(x: Tensor) -> bool:
    """Whether a wait for it held the host, or it is a compiler's stand-in."""
    return type(x) is not Tensor or x.device.type == "cpu"


def event_of(x: Tensor) -> Any:
    """An event behind what the device's current stream has been given so far."""
    module = torch.get_device_module(x.device.type)
    with module.device(x.device):
        if getattr(module, "is_current_stream_capturing", lambda: False)():
            raise RuntimeError("the stream is being captured")
        event = module.Event()
        event.record()
    return event
