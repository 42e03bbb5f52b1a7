"""The OpenAPI document says what the server does: same routes, same shapes."""

from __future__ import annotations

import re
from typing import get_type_hints

import msgspec

from relume.controlplane.admin import models
from relume.events.vocabulary.enums import Word
from tests.admin.scene import VIEWER, Scene


def resolve(document: dict, schema: dict) -> dict:
    """Follow a $ref."""
    if "$ref" in schema:
        return document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def mismatches(document: dict, schema: dict, value, where: str = "$") -> list[str]:
    """Where `value` is not what `schema` says: types, required and unknown fields."""
    schema = resolve(document, schema)
    if "anyOf" in schema:
        tried = [mismatches(document, s, value, where) for s in schema["anyOf"]]
        return [] if any(not t for t in tried) else tried[0]
    kinds = {
        "object": dict, "array": list, "string": str, "integer": int, "boolean": bool,
        "number": (int, float), "null": type(None),
    }  # fmt: skip
    if "enum" in schema:
        return [] if value in schema["enum"] else [f"{where}: {value!r} is no word of it"]
    kind = schema.get("type")
    if kind is None:
        return []
    if not isinstance(value, kinds[kind]):
        return [f"{where}: {value!r} is no {kind}"]
    found = []
    if kind == "object":
        known = schema.get("properties", {})
        found += [f"{where}.{n} is missing" for n in schema.get("required", []) if n not in value]
        if known:
            found += [f"{where}.{n} is not described" for n in value if n not in known]
        for name, inner in known.items():
            if name in value:
                found += mismatches(document, inner, value[name], f"{where}.{name}")
    elif kind == "array" and schema.get("items"):
        for i, item in enumerate(value):
            found += mismatches(document, schema["items"], item, f"{where}[{i}]")
    return found


async def test_every_route_is_described_and_every_description_is_a_route():
    async with Scene() as scene:
        _, document = await scene.call("openapi.json")
        described = {
            (method.upper(), path) for path, item in document["paths"].items() for method in item
        }
        served = {
            (r.method, r.resource.canonical)
            for r in scene.admin._runner.app.router.routes()
            if r.method != "HEAD"
        }
        assert described == served
        operations = [op for item in document["paths"].values() for op in item.values()]
        ids = [op["operationId"] for op in operations]
        assert len(ids) == len(set(ids))
        for path, item in document["paths"].items():
            for operation in item.values():
                names = {p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"}
                assert names == set(re.findall(r"\{(\w+)\}", path))
        text = str(document)
        for name in re.findall(r"#/components/schemas/(\w+)", text):
            assert name in document["components"]["schemas"]


async def test_answers_have_the_described_shape():
    async with Scene() as scene:
        await scene.worker("w0")
        await scene.worker("w1")
        await scene.serve_request("req-1")
        _, command = await scene.call("workers/w0/drain", "POST")
        _, document = await scene.call("openapi.json")
        values = {"name": "w0", "id": "req-1"}
        checked = 0
        for path, item in document["paths"].items():
            operation = item.get("get")
            if operation is None:
                continue
            content = operation["responses"]["200"]["content"]
            if "application/json" not in content:
                continue  # the metrics, and the files of the page
            concrete = path.format(**values)
            if "commands" in path:
                concrete = path.format(id=command["command_id"])
            status, answer = await scene.call(concrete)
            content = operation["responses"][str(status)]["content"]["application/json"]
            assert mismatches(document, content["schema"], answer) == [], path
            checked += 1
        assert checked >= 14
        schema = document["components"]["schemas"]["CommandInfo"]
        assert mismatches(document, schema, command) == []
        _, refused = await scene.call("config", "PUT", VIEWER, json={})
        assert mismatches(document, document["components"]["schemas"]["ErrorAnswer"], refused) == []


async def test_the_described_role_is_the_one_that_is_asked():
    async with Scene() as scene:
        _, document = await scene.call("openapi.json")
        for path, item in document["paths"].items():
            for method, operation in item.items():
                concrete = re.sub(r"\{\w+\}", "x", path)
                status = await scene.status(concrete, method.upper(), token="nobody")
                assert (status == 401) == bool(operation.get("security")), (method, path)
                if operation.get("x-relume-role") in ("operator", "admin"):
                    status, _ = await scene.call(concrete, method.upper(), token=VIEWER)
                    assert status == 403


async def test_words_are_described_as_the_vocabularies_have_them():
    async with Scene() as scene:
        _, document = await scene.call("openapi.json")
    schemas, checked = document["components"]["schemas"], 0
    for name, schema in schemas.items():
        kind = getattr(models, name, None)
        if kind is None or not issubclass(kind, msgspec.Struct):
            continue
        for field, words in get_type_hints(kind).items():
            if isinstance(words, type) and issubclass(words, Word):
                described = resolve(document, schema["properties"][field])
                assert sorted(described["enum"]) == sorted(words), (name, field)
                checked += 1
    assert checked >= 6
