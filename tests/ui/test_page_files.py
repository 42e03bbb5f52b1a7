"""The files of the page: what protects its viewers, and that nothing is missing."""

from __future__ import annotations

import gzip
import re

import pytest

from relume.controlplane.admin.events_api import TYPES
from relume.controlplane.cli.log_events import NOISE
from relume.controlplane.ui.static_files import FOLDER, KINDS, read_files
from relume.events.vocabulary.enums import RequestState, WorkerState
from tests.admin.scene import VIEWER, Scene

SCRIPTS = {path.name: path.read_text() for path in sorted(FOLDER.glob("*.js"))}
DOCUMENT = (FOLDER / "index.html").read_text()
STYLE = (FOLDER / "page.css").read_text()


async def test_the_page_is_public_and_its_data_are_not():
    async with Scene() as scene:
        for path in ("/ui/", "/ui/main.js", "/ui/page.css", "/ui/icon.svg"):
            assert await scene.status(path, token="") == 200, path
        for path in ("/admin/v1/moment", "/admin/v1/moment?follow=1", "/admin/v1/requests/x/why"):
            assert await scene.status(path, token="") == 401, path
            assert await scene.status(path, token="nobody") == 401, path
        assert await scene.status("/admin/v1/moment", token=VIEWER) == 200


async def test_every_file_forbids_scripts_and_data_from_elsewhere():
    async with Scene() as scene:
        for path in ("/ui", "/ui/", "/ui/main.js"):
            url = scene.admin.url + path
            async with scene.session.get(url, allow_redirects=False) as answer:
                policy = answer.headers["Content-Security-Policy"]
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert answer.headers["X-Frame-Options"] == "DENY"
        rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
        assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
        assert rules["script-src"] == rules["connect-src"] == rules["style-src"] == "'self'"
        assert rules["require-trusted-types-for"] == "'script'"
        assert "unsafe" not in policy and "*" not in policy


async def test_a_file_is_sent_once_and_compressed():
    async with Scene() as scene:
        url = f"{scene.admin.url}/ui/main.js"
        async with scene.session.get(url, headers={"Accept-Encoding": "gzip"}) as answer:
            assert answer.headers["Content-Encoding"] == "gzip"
            assert await answer.text() == SCRIPTS["main.js"]
            tag = answer.headers["ETag"]
        async with scene.session.get(url, headers={"If-None-Match": tag}) as answer:
            assert answer.status == 304 and not await answer.read()
        async with scene.session.get(url, headers={"Accept-Encoding": "identity"}) as answer:
            assert "Content-Encoding" not in answer.headers
            assert await answer.text() == SCRIPTS["main.js"]


async def test_only_files_of_the_page_are_served():
    async with Scene() as scene:
        for name in ("none.js", "..%2Fstatic_files.py", "%2e%2e%2fmoment.py", "index.html.bak", ""):
            expected = 200 if not name else 404
            assert await scene.status(f"/ui/{name}", token="") == expected, name
        async with scene.session.get(f"{scene.admin.url}/ui") as answer:
            assert answer.url.path == "/ui/" and "<title>" in await answer.text()


def test_files_are_whole():
    files = read_files()
    assert set(files) == {p.name for p in FOLDER.iterdir()} and "index.html" in files
    for name, file in files.items():
        assert gzip.decompress(file.packed) == file.plain, name
        assert file.kind in KINDS.values()


def test_the_document_has_nothing_inline_and_nothing_from_elsewhere():
    assert not re.search(r"<script(?![^>]*\bsrc=)", DOCUMENT)
    assert not re.search(r"\s(style|on\w+)=", DOCUMENT)
    everything = [DOCUMENT, STYLE, *SCRIPTS.values()]
    namespaces = ("http://www.w3.org/2000/svg",)
    for text in everything:
        found = [url for url in re.findall(r"https?://[^\s\"'`)]+", text) if url not in namespaces]
        assert not found
    assert "url(" not in STYLE and "@import" not in STYLE


def test_scripts_make_no_html_of_text():
    for name, text in SCRIPTS.items():
        for risky in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "Function(",
        ):
            assert risky not in text, name
        assert "localStorage" not in text, "a token ends with its tab"


@pytest.mark.parametrize("name", SCRIPTS)
def test_imported_modules_and_names_exist(name: str):
    for names, module in re.findall(r"import \{([^}]+)\} from \"\./([\w.]+)\"", SCRIPTS[name]):
        for one in filter(None, (part.strip() for part in names.split(","))):
            exported = rf"export (async )?(const|class|function) {one}\b"
            assert re.search(exported, SCRIPTS[module]), f"{name}: {one} of {module}"
            assert len(re.findall(rf"\b{one}\b", SCRIPTS[name])) > 1, f"{name}: {one} is not used"


def test_elements_that_scripts_use_are_in_the_document():
    used = {one for text in SCRIPTS.values() for one in re.findall(r"byId\(\"([\w-]+)\"\)", text)}
    declared = re.findall(r"\sid=\"([\w-]+)\"", DOCUMENT)
    assert len(declared) == len(set(declared))
    made = {one for text in SCRIPTS.values() for one in re.findall(r"\bid: \"([\w-]+)\"", text)}
    assert used <= {*declared, *made} and made.isdisjoint(declared)
    assert set(re.findall(r"href=\"#([\w-]+)\"", DOCUMENT)) <= set(declared)


def test_every_state_has_a_shape_and_a_word():
    words = SCRIPTS["words.js"]
    for table, states in (("WORKER_STATES", WorkerState), ("REQUEST_STATES", RequestState)):
        block = words.split(f"export const {table} = {{")[1].split("};")[0]
        assert set(re.findall(r"(\w+): \[", block)) == {str(state) for state in states}
        for shape in re.findall(r"\"(\w+)\"\]", block):
            assert re.search(rf"^  {shape}: \"M", words, re.MULTILINE), shape


def test_filters_name_types_that_exist():
    events = SCRIPTS["events.js"]
    assert f'NOISE = "{NOISE}"' in events
    named = {one for text in re.findall(r"{ type: \"([\w,]+)\"", events) for one in text.split(",")}
    assert len(named) > 20 and named <= set(TYPES)
    tones = re.findall(r"^  (\w+): \[", SCRIPTS["why.js"], re.MULTILINE)
    known = set(TYPES) | {"request_preempted", "engine_finished"}
    assert set(tones) <= known
