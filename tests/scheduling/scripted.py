"""A core whose connector answers what a script says: not known yet, or a load that is part of the step."""

from __future__ import annotations

from actors.configuration import SchedulerConfiguration
from actors.scheduling.connector import NOTHING_REMOTE, RemoteMatch, TicketConnector
from actors.scheduling.core import SchedulerCore
from actors.scheduling.request import SchedulerRequest


class ScriptedConnector(TicketConnector):
    def __init__(self) -> None:
        self.undecided: set[str] = set()
        self.in_step: dict[str, int] = {}  # request -> leading tokens that a step can load

    def matched(self, request: SchedulerRequest, num_local_tokens: int) -> RemoteMatch | None:
        if request.request_id in self.undecided:
            return None
        if request.request_id in self.in_step:
            num_remote = min(self.in_step[request.request_id], len(request.tokens) - 1) - num_local_tokens
            return RemoteMatch(num_remote) if num_remote > 0 else NOTHING_REMOTE
        return super().matched(request, num_local_tokens)


class ScriptedCore(SchedulerCore):
    def __init__(self, config: SchedulerConfiguration) -> None:
        self.connector = ScriptedConnector()
        super().__init__(config, self.connector)


def script(core: SchedulerCore, request_id: str, *, is_undecided: bool, in_step: int) -> None:
    """Cores with another connector know nothing of it."""
    if isinstance(core, ScriptedCore):
        if is_undecided:
            core.connector.undecided.add(request_id)
        if in_step:
            core.connector.in_step[request_id] = in_step


def decide(core: SchedulerCore, request_id: str, now: float) -> None:
    """It is no input of the core, which a step without rows that comes back makes look again."""
    if isinstance(core, ScriptedCore):
        core.connector.undecided.discard(request_id)
    core.apply_step(None, {}, now)
