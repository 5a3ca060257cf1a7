"""An issuer's key server, and gateways that trust it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.identity import jwks, jwt
from gateway.request import pipeline
from tests.gateway.conftest import PATIENCE_S, Open
from tests.gateway.identity.idp import OLD, RARE_S, Idp, opened
from tests.gateway.identity.issuers import KeyServer


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is slow, not wrong."""
    monkeypatch.setattr(jwt, "REFETCH_WAIT_S", PATIENCE_S)
    monkeypatch.setattr(jwks, "FETCH_S", PATIENCE_S)
    monkeypatch.setattr(pipeline, "IDENTITY_S", PATIENCE_S)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[KeyServer]:
    async with KeyServer(tmp_path, (OLD,)) as server:
        yield server


@pytest.fixture
async def idp(open_house: Open, server: KeyServer) -> Idp:
    return await opened(open_house, server)


@pytest.fixture
async def rare(open_house: Open, server: KeyServer, monkeypatch: pytest.MonkeyPatch) -> Idp:
    """One whose keys are rarely fetched because of unknown ones."""
    monkeypatch.setattr(jwks, "REFETCH_S", RARE_S)
    return await opened(open_house, server)
