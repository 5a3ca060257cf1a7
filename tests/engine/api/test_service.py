"""Models, tokenization, probes, metrics, and an API process without torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from shared.text.tokenizer import Tokenizer, TokenizerBundle
from shared.wire.ids import IGNORED_FIELDS_HEADER
from tests.engine.api.conftest import MODEL, Serve, Served

TOOLS = [{"type": "function", "function": {"name": "f"}}]
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


async def test_models(served: Served) -> None:
    page = await served.sdk.models.list()
    assert [model.id for model in page.data] == [MODEL]
    assert (await served.sdk.models.retrieve(MODEL)).id == MODEL
    card = (await served.http.get(f"/v1/models/{MODEL}")).json()
    assert card["max_model_len"] == served.core.info.max_model_len
    assert "context_len" not in card
    assert card["created"] > 0


async def test_the_fingerprint_changes_with_what_changes_the_numbers(served: Served) -> None:
    state = served.engine.state
    config, info = state.config, served.core.info
    first = state.fingerprint()
    state.config = replace(config, port=1, max_num_seqs=3, attention_backend="triton", kernels="native")
    state.core.info = msgspec.structs.replace(info, pages=1, max_model_len=7)
    assert state.fingerprint() == first, "what a setting has become counts, and not what it says"
    seen = {first}
    for changed in ({"dtype": "bfloat16"}, {"arithmetic": "other kernels"}):
        state.core.info = msgspec.structs.replace(info, **changed)
        seen.add(state.fingerprint())
    state.core.info, state.config = info, replace(config, revision="v2")
    seen.add(state.fingerprint())
    assert len(seen) == 4


async def test_the_context_is_what_the_kv_pool_holds_where_that_is_less(serve: Serve) -> None:
    """The last token of an answer is never computed, so it needs no room."""
    async with serve(core={"pages": 4, "page_size": 16}) as served:
        served.says("x", ends=False)
        card = (await served.http.get("/v1/models")).json()["data"][0]
        assert (card["max_model_len"], card["context_len"]) == (65, 256)
        tokens = (await served.http.post("/tokenize", json={"prompt": "a"})).json()
        assert tokens["max_model_len"] == 65
        for completion, status in ((5, 200), (6, 400)):
            body = {"model": MODEL, "prompt": [5] * 60, "max_tokens": completion, "stop": ["x"]}
            assert (await served.http.post("/v1/completions", json=body)).status_code == status


async def test_tokenize_and_back(served: Served) -> None:
    text = "the lazy 日 dog"
    answer = (await served.http.post("/tokenize", json={"model": MODEL, "prompt": text})).json()
    assert answer == {
        "count": len(served.ids(text)),
        "max_model_len": served.core.info.max_model_len,
        "tokens": served.ids(text),
    }
    back = await served.http.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": text}


async def test_tokenize_counts_a_chat_as_a_request_does(served: Served) -> None:
    served.says("x")
    answer = (await served.http.post("/tokenize", json=CHAT)).json()
    usage = (await served.http.post("/v1/chat/completions", json=CHAT)).json()["usage"]
    assert answer["tokens"] == served.core.added[0].prompt_ids
    assert answer["count"] == usage["prompt_tokens"]


async def test_tokenize_wants_one_of_two(served: Served) -> None:
    for body in ({"model": MODEL}, {"prompt": "a", "messages": CHAT["messages"]}):
        assert (await served.http.post("/tokenize", json=body)).status_code == 400
    assert (await served.http.post("/detokenize", json={"tokens": [340]})).status_code == 400
    assert (await served.http.post("/tokenize", json={"model": "other", "prompt": "a"})).status_code == 404


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": TOOLS}, "tools"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"messages": [{"role": "assistant", "content": "", "prefix": True}]}, "messages[0].prefix"),
    ],
)
async def test_tokenize_refuses_what_would_be_other_tokens(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    answer = await served.http.post("/tokenize", json={**CHAT, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_tokenize_and_back_name_unknown_fields(served: Served) -> None:
    special = {"add_special_tokens": False, "add_special_token": False}
    answer = await served.http.post("/tokenize", json={"prompt": "a", **special})
    assert answer.headers[IGNORED_FIELDS_HEADER] == "add_special_token"
    back = await served.http.post("/detokenize", json={"tokens": answer.json()["tokens"], "spaces": 1})
    assert (back.json()["prompt"], back.headers[IGNORED_FIELDS_HEADER]) == ("a", "spaces")
    skipping = await served.http.post("/detokenize", json={"tokens": [5], "skip_special_tokens": True})
    assert skipping.json()["error"]["param"] == "skip_special_tokens"


async def test_the_tokenizer_travels(served: Served) -> None:
    response = await served.http.get("/penstock/tokenizer")
    bundle = msgspec.json.decode(response.content, type=TokenizerBundle)
    assert bundle.hash == response.headers["x-penstock-tokenizer"] == served.tokenizer.hash
    assert Tokenizer(bundle).encode("the fox") == served.ids("the fox")


async def test_probes(served: Served) -> None:
    for probe in ("/livez", "/readyz", "/startupz"):
        answer = await served.http.get(probe)
        assert (answer.status_code, answer.json()) == (200, {"phase": "ready", "ok": True})
        for method in ("HEAD", "OPTIONS"):
            assert (await served.http.request(method, probe)).status_code == 200
        assert (await served.http.post(probe)).status_code == 405


def sample(text: str, name: str, **labels: str) -> float:
    [value] = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return value


async def test_metrics(served: Served) -> None:
    served.says("the dog")
    await served.http.post("/v1/chat/completions", json=CHAT)
    await served.http.post("/v1/chat/completions", json={**CHAT, "temperature": 9})
    response = await served.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    text = response.text
    assert sample(text, "penstock_engine_requests_total", end_reason="ok") == 1
    assert sample(text, "penstock_engine_requests_total", end_reason="refused") == 1
    assert sample(text, "penstock_engine_prompt_tokens_total") == len(served.core.added[0].prompt_ids)
    assert sample(text, "penstock_engine_generated_tokens_total") == len(served.ids("the dog")) + 1
    assert sample(text, "penstock_engine_time_to_first_token_seconds_count") == 1
    assert sample(text, "penstock_engine_time_per_output_token_seconds_count") == 1
    assert sample(text, "penstock_engine_queue_depth") == 0
    assert sample(text, "penstock_engine_open_sequences") == 0
    assert sample(text, "penstock_engine_kv_pages", state="cached") == 0
    assert sample(text, "penstock_engine_prefix_hit_tokens_total") == 4
    assert sample(text, "penstock_engine_ready") == 1
    assert sample(text, "penstock_engine_step_seconds_count") >= len(served.ids("the dog"))


def test_the_api_process_imports_no_torch() -> None:
    code = (
        "import sys, engine.__main__, engine.api.http.server, engine.api.core.process;"
        "import engine.runtime.setup.hub;"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
