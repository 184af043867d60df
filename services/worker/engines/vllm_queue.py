"""vLLM's waiting queue as the planner needs it: whom the plan admits stands in front, in the plan's order; everybody else is in the pool.

vLLM's scan takes from a queue until it is empty, so truth means "somebody is to be admitted", while length counts everybody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue


class PlannedQueue(RequestQueue):
    def __init__(self) -> None:
        self._pool: dict[str, Any] = {}
        self._front: deque[Any] = deque()

    def present(self, requests: Iterable[Any]) -> None:
        """Whom the next step may admit, first things first."""
        self._front = deque(requests)

    def add_request(self, request: Any) -> None:
        self._pool[request.request_id] = request

    def pop_request(self) -> Any:
        request = self._front.popleft()
        del self._pool[request.request_id]
        return request

    def peek_request(self) -> Any:
        return self._front[0]

    def prepend_request(self, request: Any) -> None:
        # Preempted or skipped: the next plan says when it goes.
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            self.add_request(request)

    def remove_request(self, request: Any) -> None:
        self.remove_requests((request,))

    def remove_requests(self, requests: Iterable[Any]) -> None:
        gone = {r.request_id for r in requests}
        for request_id in gone:
            self._pool.pop(request_id, None)
        if self._front:
            self._front = deque(r for r in self._front if r.request_id not in gone)

    def __bool__(self) -> bool:
        return bool(self._front)

    def __len__(self) -> int:
        return len(self._pool)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._pool.values())
