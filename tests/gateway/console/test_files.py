"""The console's files: vendored ones are as they were published, and ours keep to the page's policy."""

from __future__ import annotations

import hashlib
import re

from gateway.operators.files import STATIC
from shared.wire.end_reason import EndReason

VENDOR = STATIC / "vendor"
ROW = re.compile(r"^\| ([\w.]+) \| ([\d.]+) \|.*\| ([0-9a-f]{64}) \| [\w.]+, ([\w.]+) \|$", re.MULTILINE)


def test_every_vendored_file_has_its_version_its_hash_and_its_licence() -> None:
    rows = ROW.findall((VENDOR / "README.md").read_text())
    assert len(rows) == 2
    for name, version, digest, licence in rows:
        data = (VENDOR / name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == digest, name
        assert version.encode() in data or name.endswith(".css"), name
        assert "Permission is hereby granted" in (VENDOR / licence).read_text()
    named = {name for name, *_ in rows} | {licence for *_, licence in rows} | {"README.md"}
    assert {path.name for path in VENDOR.iterdir()} == named


UNSAFE = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "@import")


def test_our_files_have_nothing_inline_and_load_nothing_from_elsewhere() -> None:
    """Text gets into the page by `textContent` alone: what tenants choose is never markup."""
    html = (STATIC / "index.html").read_text()
    assert not re.search(r"<style|style=|\son[a-z]+=|javascript:|<script>", html)
    ours = [path for path in STATIC.rglob("*") if path.suffix in (".html", ".css", ".js", ".svg")]
    ours = [path for path in ours if VENDOR not in path.parents]
    assert len(ours) > 2
    for path in ours:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        found = [word for word in (*UNSAFE, "http:", "https:", 'src="//') if word in text]
        assert not found, (path.name, found)


def test_the_filter_has_the_reasons_for_which_requests_end() -> None:
    text = (STATIC / "requests.js").read_text()
    names = re.findall(r'"(\w+)"', text[text.index("END_REASONS = [") : text.index("];")])
    assert names == [str(reason) for reason in EndReason]


def test_a_page_whose_session_has_ended_is_loaded_anew() -> None:
    """Its views keep a conversation and filters, which the next operator would find."""
    text = (STATIC / "main.js").read_text()
    assert re.search(r"function end\(why\) \{[^}]*location\.reload\(\);\n\}", text)
    assert set(re.findall(r"(\w+)\(\"(?:The session has ended|You are logged out)", text)) == {"end"}


def test_a_name_that_every_object_has_is_no_view() -> None:
    assert "new Map(Object.entries({" in (STATIC / "main.js").read_text()
