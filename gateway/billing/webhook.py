"""Posting the billing lines to a webhook.

Each post is a batch of lines from the file (`gateway.billing.spool`), one JSON object a line, signed as
Standard Webhooks asks (https://www.standardwebhooks.com): `webhook-id`, `webhook-timestamp`, and in
`webhook-signature` an HMAC-SHA256 over both and the body.

Rules:

1. Any 2xx means taken. Everything else, no answer included, is tried again, after `RETRY_S_MIN` and twice as
   long each time, up to `RETRY_S_MAX`, for ever: the file keeps the lines. The order holds.
2. A batch that is tried again in the same process has the same bytes and the same `webhook-id`. The secret
   and the authorities that are trusted are those of the moment: files are looked at for each post.
3. A disk that is full, and so takes no note of what was taken, is asked again every `POLL_S`. Nothing is
   posted twice for it, unless the process ends before there is room.
4. Nothing of a request waits for this: it is a task of its own, which holds one batch.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import random
from collections.abc import Mapping
from functools import partial
from typing import Final

import httpx

from gateway.billing.lines import LINES
from gateway.billing.spool import Batch, Spool
from gateway.config.accounting import AccountingConfig
from gateway.config.secret import RenewableSecret
from shared.process import logs
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.metrics import Counter
from shared.process.renewable_tls import RenewableTls
from shared.process.setting_values import ConfigError
from shared.process.tls import UnusableTls, client_context

POLL_S: Final = 1.0
"""The time between two looks at the file, in seconds: as long do lines wait for others to go with them."""
POST_S: Final = 10.0
"""How long a post may take, in seconds."""
RETRY_S_MIN: Final = 1.0
RETRY_S_MAX: Final = 300.0
JITTER: Final = 0.2
"""The part of each wait that is left to chance, so that gateways do not all come at once."""
SECRET_LEN_MIN: Final = 24
"""Bytes, as Standard Webhooks recommends."""
CONTENT_TYPE: Final = "application/x-ndjson"
_SECRET_PREFIX: Final = "whsec_"  # noqa: S105  what secrets begin with

POSTS: Final = Counter("penstock_gateway_billing_posts", "Posts of billing lines.", ["outcome"])

log = logs.get(__name__)


class Webhook:
    """The receiver of billing lines: `send` as a background task."""

    def __init__(
        self,
        url: str,
        secret: RenewableSecret,
        tls: RenewableTls,
        spool: Spool,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`secret` is one of `webhook_secret`, and `tls` of `webhook_tls`."""
        self._url: Final = url
        self._secret: Final = secret
        self._tls: Final = tls
        self._spool: Final = spool
        self._clock: Final = clock

    async def send(self) -> None:
        """Post the lines as they come, until cancelled."""
        async with httpx.AsyncClient(
            verify=self._tls.context,
            follow_redirects=False,
            trust_env=False,
            timeout=None,  # noqa: S113 -- `_post` bounds the whole
        ) as client:
            while True:
                try:
                    batch = await asyncio.to_thread(self._spool.next_batch)
                    if batch is None:
                        await asyncio.to_thread(self._spool.note)
                    else:
                        await self._deliver(client, batch)
                        LINES.inc("sent", by=batch.lines)
                        await asyncio.to_thread(self._spool.sent, batch)
                except OSError as error:
                    log.error("billing.spool_failed", problem=str(error), again_s=POLL_S)
                    batch = None
                if batch is None:
                    await self._clock.sleep(POLL_S)

    async def _deliver(self, client: httpx.AsyncClient, batch: Batch) -> None:
        """Post a batch until it is taken."""
        retry_s = RETRY_S_MIN
        while (problem := await self._post(client, batch.data)) is not None:
            log.warning("billing.not_taken", problem=problem, lines=batch.lines, again_s=retry_s)
            await self._clock.sleep(retry_s * (1 - JITTER * random.random()))
            retry_s = min(RETRY_S_MAX, 2 * retry_s)

    async def _post(self, client: httpx.AsyncClient, body: bytes) -> str | None:
        """Post once. Returns why the lines were not taken; None when they were."""
        await self._tls.look()
        secret = _decoded(await self._secret.now() or "")
        headers = signed_headers(secret, int(self._clock.wall()), body)
        try:
            async with asyncio.timeout(POST_S):
                async with client.stream("POST", self._url, content=body, headers=headers) as answer:
                    status = answer.status_code  # its body is not read
        except (httpx.HTTPError, TimeoutError, OSError) as error:
            POSTS.inc("unreachable")
            return type(error).__name__
        if httpx.codes.is_success(status):
            POSTS.inc("taken")
            return None
        POSTS.inc("refused")
        return f"status {status}"


def webhook_secret(config: AccountingConfig, env: Mapping[str, str]) -> RenewableSecret:
    """The secret that signs posts to the webhook. Raises ConfigError when it cannot be used."""
    if config.webhook is None:
        return RenewableSecret(None, env)
    try:
        return RenewableSecret(config.webhook_secret, env, _decoded)
    except ValueError as error:
        raise ConfigError([f"accounting.webhook_secret: {error}"]) from None


def webhook_tls(config: AccountingConfig) -> RenewableTls:
    """The authorities that are trusted when lines are posted. Raises ConfigError when they cannot be used."""
    load = partial(client_context, ca=config.webhook_ca)
    try:
        return RenewableTls((config.webhook_ca,), load, is_server=False)
    except UnusableTls as error:
        raise ConfigError([f"accounting.webhook_ca: {error}"]) from None


def _decoded(text: str) -> bytes:
    """The bytes of a secret as Standard Webhooks writes it. Raises ValueError."""
    if not text.startswith(_SECRET_PREFIX):
        raise ValueError(f"it must begin with {_SECRET_PREFIX}")
    secret = base64.b64decode(text.removeprefix(_SECRET_PREFIX), validate=True)
    if len(secret) < SECRET_LEN_MIN:
        raise ValueError(f"it must have at least {SECRET_LEN_MIN} bytes")
    return secret


def signed_headers(secret: bytes, at_s: int, body: bytes) -> dict[str, str]:
    """The headers of a post at `at_s`, seconds since the epoch."""
    id_ = f"msg_{hashlib.sha256(body).hexdigest()[:32]}"
    signed = f"{id_}.{at_s}.".encode() + body
    signature = base64.b64encode(hmac.digest(secret, signed, "sha256")).decode()
    return {
        "content-type": CONTENT_TYPE,
        "user-agent": "penstock-gateway",
        "webhook-id": id_,
        "webhook-timestamp": str(at_s),
        "webhook-signature": f"v1,{signature}",
    }
