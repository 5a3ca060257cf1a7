"""Images by digest: what a registry is asked, what is believed of its answer, and where a release insists."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from helm.make.pins import HOSTS, MANIFESTS, PinError, images, main, pinned

ROOT = Path(__file__).parents[2]
IMAGE = "docker.io/library/redis:7.4.1-bookworm"
BODY = b'{"schemaVersion": 2}'
DIGEST = f"sha256:{hashlib.sha256(BODY).hexdigest()}"
CHALLENGE = (
    'Bearer realm="https://auth.example/token",service="registry",scope="repository:library/redis:pull"'
)
Answer = Callable[[httpx.Request], httpx.Response]


def asking(answer: Answer) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(answer))


def manifest(body: bytes = BODY, told: str = DIGEST) -> httpx.Response:
    headers = {"content-type": MANIFESTS[0], "docker-content-digest": told}
    return httpx.Response(200, content=body, headers=headers)


def test_a_registry_that_wants_a_token_is_given_one() -> None:
    asked: list[httpx.URL] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url)
        if request.url.host == "auth.example":
            assert request.url.params["scope"] == "repository:library/redis:pull"
            return httpx.Response(200, json={"token": "t"})
        if request.headers.get("authorization") != "Bearer t":
            return httpx.Response(401, headers={"www-authenticate": CHALLENGE})
        assert MANIFESTS[0] in request.headers["accept"]
        return manifest()

    assert pinned(IMAGE, asking(answer)) == f"docker.io/library/redis@{DIGEST}"
    assert [url.host for url in asked] == [HOSTS["docker.io"], "auth.example", HOSTS["docker.io"]]
    assert asked[0].path == "/v2/library/redis/manifests/7.4.1-bookworm"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (manifest(told=f"sha256:{'0' * 64}"), "and sends sha256:"),
        (httpx.Response(200, html="<html>"), "no manifest"),
        (manifest(bytes((4 << 20) + 1)), "no manifest"),
        (httpx.Response(404), "answers 404"),
        (httpx.Response(401), "answers 401"),
        (
            httpx.Response(401, headers={"www-authenticate": CHALLENGE.replace("https", "http")}),
            "answers 401",
        ),
    ],
)
def test_what_cannot_be_believed_is_no_digest(answer: httpx.Response, says: str) -> None:
    with pytest.raises(PinError, match=says):
        pinned(IMAGE, asking(lambda _: answer))


def test_a_registry_that_is_not_reached_is_named() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no such host", request=request)

    with pytest.raises(PinError, match=f"{IMAGE}: ConnectError"):
        pinned(IMAGE, asking(answer))


@pytest.mark.parametrize("image", ["redis", f"docker.io/library/redis@{DIGEST}", "docker.io/redis"])
def test_an_image_without_a_tag_is_refused(image: str) -> None:
    with pytest.raises(PinError, match="not HOST/NAME:TAG"):
        pinned(image, asking(lambda _: manifest()))


def test_lines_for_env_are_printed_and_failures_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def one(image: str, http: httpx.Client) -> str:
        if "grafana" in image:
            raise PinError(f"{image}: not today")
        return f"{image.rpartition(':')[0]}@{DIGEST}"

    monkeypatch.setattr("helm.make.pins.pinned", one)
    assert main() == 1
    told = capsys.readouterr()
    assert f"REDIS_IMAGE=docker.io/library/redis@{DIGEST}\n" in told.out
    assert "GRAFANA_IMAGE" not in told.out
    assert "not today" in told.err


# -- where they go ----------------------------------------------------------------------------------


def test_every_image_of_others_can_be_pinned() -> None:
    found = images()
    services = re.findall(r"^    image: (.*)$", (ROOT / "compose.yaml").read_text(), re.MULTILINE)
    assert [image for image in services if image.startswith("docker.io")] == []
    assert found.keys() == {
        *("BASE_IMAGE", "REDIS_IMAGE", "PROMETHEUS_IMAGE", "GRAFANA_IMAGE", "TRACES_IMAGE"),
    }
    for name in ("gateway", "engine"):
        assert f"ARG BASE={found['BASE_IMAGE']}\n" in (ROOT / name / "Dockerfile").read_text()


@pytest.mark.parametrize("name", ["gateway", "engine"])
@pytest.mark.parametrize(
    ("release", "base", "is_taken"),
    [
        ("no", "python:3.11", True),
        ("yes", f"python@{DIGEST}", True),
        ("yes", "python:3.11", False),
        ("yes", "python@sha256", False),
        ("true", f"python@{DIGEST}", False),
    ],
)
def test_a_release_refuses_a_base_without_a_digest(
    name: str, release: str, base: str, is_taken: bool
) -> None:
    """The first instruction of the Dockerfile, as a shell runs it."""
    text = (ROOT / name / "Dockerfile").read_text()
    first = text.split("FROM ${BASE} AS build\n")[1]
    declared, _, rest = first.partition("RUN ")
    assert re.fullmatch(r"ARG BASE\nARG RELEASE=no\n", declared)
    command = rest.partition("esac\n")[0] + "esac"
    environment = {"RELEASE": release, "BASE": base}
    done = subprocess.run(["/bin/sh", "-c", command], env=environment, capture_output=True, text=True)
    assert (done.returncode == 0) == is_taken
    assert ("helm.make.pins" in done.stderr) == (not is_taken)
