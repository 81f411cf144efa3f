"""The two orders in which waiting requests are served. `waiting` and `skipped_waiting` are each one of these.

Iteration is in the order of service. Removal of one in the middle is linear: only aborts and deadlines need it.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from actors.scheduling.request import SchedulerRequest


class RequestQueue(Protocol):
    def push(self, request: SchedulerRequest) -> None: ...
    def push_front(self, request: SchedulerRequest) -> None: ...
    def push_front_all(self, requests: list[SchedulerRequest]) -> None:
        """They keep their order, ahead of those that are here."""

    def peek(self) -> SchedulerRequest: ...
    def pop(self) -> SchedulerRequest: ...
    def remove(self, request: SchedulerRequest) -> None: ...
    def __contains__(self, request: object) -> bool: ...
    def __iter__(self) -> Iterator[SchedulerRequest]: ...
    def __len__(self) -> int: ...


class FcfsQueue:
    def __init__(self) -> None:
        self._requests: deque[SchedulerRequest] = deque()

    def push(self, request: SchedulerRequest) -> None:
        self._requests.append(request)

    def push_front(self, request: SchedulerRequest) -> None:
        self._requests.appendleft(request)

    def push_front_all(self, requests: list[SchedulerRequest]) -> None:
        self._requests.extendleft(reversed(requests))

    def peek(self) -> SchedulerRequest:
        return self._requests[0]

    def pop(self) -> SchedulerRequest:
        return self._requests.popleft()

    def remove(self, request: SchedulerRequest) -> None:
        self._requests.remove(request)

    def __contains__(self, request: object) -> bool:
        return request in self._requests

    def __iter__(self) -> Iterator[SchedulerRequest]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)


def _order(request: SchedulerRequest) -> tuple[int, float, str]:
    return request.order


class PriorityQueue:
    """Smallest (priority, arrival, id) first; there is no front to push to."""

    def __init__(self) -> None:
        self._requests: list[SchedulerRequest] = []

    def push(self, request: SchedulerRequest) -> None:
        insort(self._requests, request, key=_order)

    push_front = push

    def push_front_all(self, requests: list[SchedulerRequest]) -> None:
        for request in requests:
            self.push(request)

    def peek(self) -> SchedulerRequest:
        return self._requests[0]

    def pop(self) -> SchedulerRequest:
        return self._requests.pop(0)

    def remove(self, request: SchedulerRequest) -> None:
        self._requests.remove(request)

    def __contains__(self, request: object) -> bool:
        return request in self._requests

    def __iter__(self) -> Iterator[SchedulerRequest]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)
