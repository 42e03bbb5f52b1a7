"""Handlers that change something: check, then one command into the log."""

from __future__ import annotations

import msgspec
from aiohttp import web

from relume.controlplane.admin import settings
from relume.controlplane.admin.commands import CommandBook
from relume.controlplane.admin.errors import BadRequest, NotFound
from relume.controlplane.admin.models import (
    CommandDetail,
    CommandInfo,
    DrainRequest,
    RolloutRequest,
    SettingChange,
)
from relume.controlplane.admin.principals import Principal
from relume.controlplane.replica.loop import Replica
from relume.events.decode_errors import UNREADABLE
from relume.events.vocabulary.enums import AdminCommand
from relume.policies.leader.duties import RESIGN
from relume.policies.state.fleet import DrainOrder
from relume.policies.state.operator_commands import NO_ORDER


class ChangesApi:
    """POST and PUT handlers, called with the principal; they answer 200 with the leader's
    decision, 202 without."""

    def __init__(self, replica: Replica, commands: CommandBook) -> None:
        self._replica = replica
        self._commands = commands

    def worker_command(self, command: str):
        """The handler of POST workers/{name}/`command`."""

        async def handler(request: web.Request, principal: Principal) -> CommandInfo:
            name = request.match_info["name"]
            if name not in self._replica.fleet.workers:
                raise NotFound(f"no worker {name!r}; see /admin/v1/workers", "name")
            order = NO_ORDER
            if command == AdminCommand.DRAIN and (body := await request.read()):
                order = self._order_of(body)
            return await self._submit(request, principal, command, name, order=order)

        return handler

    def _order_of(self, body: bytes) -> DrainOrder:
        try:
            wanted = msgspec.json.decode(body, type=DrainRequest)
        except UNREADABLE as error:
            form = "{reason, deadline_s, force}, each optional"
            raise BadRequest(f"the body must be {form}, in JSON: {error}") from None
        ticks = self._ticks(wanted.deadline_s)
        return DrainOrder(reason=wanted.reason, deadline_ticks=ticks, force=wanted.force)

    def _ticks(self, seconds: float) -> int:
        """Ticks that take no less time."""
        return -int(-seconds // self._replica.config.tick_s)

    async def begin_rollout(self, request: web.Request, principal: Principal) -> CommandInfo:
        """POST rollout."""
        try:
            wanted = msgspec.json.decode(await request.read(), type=RolloutRequest)
        except UNREADABLE as error:
            raise BadRequest(f"the body must be {{model, deadline_s}} in JSON: {error}") from None
        order = DrainOrder(reason="", deadline_ticks=self._ticks(wanted.deadline_s), force=False)
        command = AdminCommand.ROLLOUT
        return await self._submit(request, principal, command, wanted.model, order=order)

    async def cancel_rollout(self, request: web.Request, principal: Principal) -> CommandInfo:
        """POST rollout/cancel."""
        return await self._submit(request, principal, AdminCommand.CANCEL_ROLLOUT, "")

    async def set_config(self, request: web.Request, principal: Principal) -> CommandInfo:
        """PUT config."""
        try:
            change = msgspec.json.decode(await request.read(), type=SettingChange)
        except UNREADABLE as error:
            raise BadRequest(f"the body must be {{key, value}} in JSON: {error}") from None
        value = settings.checked(change.key, change.value)
        return await self._submit(request, principal, "config", change.key, value)

    async def resign(self, request: web.Request, principal: Principal) -> CommandInfo:
        """POST leader/resign."""
        return await self._submit(request, principal, RESIGN, "leader")

    async def command(self, request: web.Request) -> CommandDetail:
        """GET commands/{id}."""
        return await self._commands.detail(request.match_info["id"])

    async def _submit(
        self,
        request: web.Request,
        principal: Principal,
        command: str,
        target: str,
        value: str = "",
        order: DrainOrder = NO_ORDER,
    ) -> CommandInfo:
        key = request.headers.get("Idempotency-Key", "")
        return await self._commands.submit(principal, key, command, target, value, order)
