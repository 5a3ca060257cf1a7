"""What the gateway asks the engines for itself: which models, and their tokenizers."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from gateway.admission.tokens import EngineProfile
from gateway.config import ModelConfig
from gateway.relay.upstream import Upstream
from shared.errors import ApiError, ConnectTimeout, UpstreamFailed, UpstreamUnreachable
from shared.ids import TOKENIZER_HEADER
from shared.tokenizer import TokenizerBundle

FETCH_S: Final = 30.0
"""For one replica, everything included."""

Headers = tuple[tuple[bytes, bytes], ...]


class _Model(msgspec.Struct):
    """Read leniently: other engines say less, and more."""

    id: str
    max_model_len: int | None = None
    created: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


async def fetch_profile(
    upstream: Upstream, model: ModelConfig, connect_s: float, headers: Headers
) -> EngineProfile:
    """Ask one replica after the other. Raises the last one's ApiError when none answers."""
    failure: ApiError | None = None
    for url in model.replicas:
        try:
            async with asyncio.timeout(FETCH_S):
                return await _fetch(upstream, model, url.rstrip("/"), connect_s, headers)
        except ApiError as error:
            failure = error
        except TimeoutError:
            failure = UpstreamFailed("The engine did not answer in time.", detail=f"{url}: {FETCH_S:g} s")
    assert failure is not None
    raise failure


async def _fetch(
    upstream: Upstream, model: ModelConfig, url: str, connect_s: float, headers: Headers
) -> EngineProfile:
    name = model.upstream_model or model.name
    _, body = await upstream.fetch(model.protocol, url, "/v1/models", connect_s, headers)
    try:
        models = msgspec.json.decode(body, type=_Models)
    except msgspec.DecodeError as error:
        raise UpstreamFailed("The engine's list of models cannot be read.", detail=str(error)) from error
    served = next((entry for entry in models.data if entry.id == name), None)
    if served is None:
        raise UpstreamFailed("The engine does not serve this model.", detail=f"{url} does not list {name!r}")
    bundle = await _fetch_bundle(upstream, model, url, connect_s, headers)
    return EngineProfile(bundle, served.max_model_len, served.created)


async def _fetch_bundle(
    upstream: Upstream, model: ModelConfig, url: str, connect_s: float, headers: Headers
) -> TokenizerBundle | None:
    """None for an engine that has none to give: it is not one of ours."""
    try:
        told, body = await upstream.fetch(model.protocol, url, "/penstock/tokenizer", connect_s, headers)
    except (ConnectTimeout, UpstreamUnreachable):
        raise
    except ApiError:
        return None
    try:
        bundle = await asyncio.to_thread(msgspec.json.decode, body, type=TokenizerBundle)
    except msgspec.DecodeError as error:
        raise UpstreamFailed("The engine's tokenizer cannot be read.", detail=str(error)) from error
    if bundle.hash != told.get(TOKENIZER_HEADER, bundle.hash):
        raise UpstreamFailed("The engine's tokenizer is damaged.", detail="its hash is not the one announced")
    return bundle
