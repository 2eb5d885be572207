"""What a consumer gets."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from railgun.client.subscription import Subscription


class Message:
    """One message. `delivery` counts how often it has been delivered, this time included."""

    __slots__ = (
        "_headers", "delivery", "epoch", "id", "offset", "payload", "response", "subscription",
        "time", "topic",
    )  # fmt: skip

    def __init__(
        self,
        subscription: Subscription,
        payload: bytes,
        offset: int,
        delivery: int,
        epoch: int,
        time: int,
        id: bytes | None,
        headers: bytes,
        topic: str,
        response: str,
    ) -> None:
        self.subscription = subscription
        self.payload = payload
        self.offset = offset
        self.delivery = delivery
        self.epoch = epoch
        self.time = time
        self.id = id
        self.topic = topic
        self.response = response
        self._headers = headers

    def __repr__(self) -> str:
        shown = self.payload if len(self.payload) <= 40 else self.payload[:37] + b"..."
        return f"Message({shown!r}, offset={self.offset}, delivery={self.delivery})"

    @property
    def headers(self) -> dict[str, str]:
        """What was given with it."""
        return dict(json.loads(self._headers)) if self._headers else {}

    @property
    def text(self) -> str:
        """The payload as text."""
        return self.payload.decode()

    def json(self) -> Any:
        """The payload, which is JSON."""
        return json.loads(self.payload)

    def ack(self) -> None:
        """It is done. The node hears of it soon."""
        self.subscription.ack(self)

    def nack(self, delay: float = 0.0, reason: str = "") -> None:
        """It is to come again, after so many seconds, to whoever is free."""
        self.subscription.nack(self, delay, reason)

    def in_progress(self) -> None:
        """It takes longer: `ack_wait` begins anew."""
        self.subscription.in_progress(self)

    async def respond(self, payload: bytes | str) -> None:
        """Answer a request."""
        await self.subscription.client.respond(self.response, payload)
