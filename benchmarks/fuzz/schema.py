"""Draws values of a JSON schema, as OpenAPI documents have them."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.fuzz.values import MORE, Source

DEEPEST = 5
_REF = "#/components/schemas/"


class Schemas:
    def __init__(
        self, source: Source, schemas: Mapping[str, Any], likely: Mapping[str, Sequence[Any]]
    ) -> None:
        """`schemas`: the document's components. `likely`: see `Source`."""
        self._source = source
        self._schemas = schemas
        self._likely = likely

    def value(self, schema: Mapping[str, Any], *, odd: float, depth: int = 0) -> Any:
        source = self._source
        if source.chance(odd):
            return source.odd()
        if "$ref" in schema:
            return self.value(self._schemas[schema["$ref"].removeprefix(_REF)], odd=odd,
                              depth=depth)  # fmt: skip
        for several in ("anyOf", "oneOf"):
            if several in schema:
                return self.value(source.random.choice(schema[several]), odd=odd, depth=depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return source.random.choice(schema["enum"])
        match schema.get("type"):
            case "object":
                return self._object(schema, odd, depth)
            case "array":
                return self._array(schema, odd, depth)
            case "string":
                return source.text()
            case "integer":
                low = schema.get("minimum", source.random.choice((0, 0, -5)))
                return source.random.randint(low, schema.get("maximum", max(low, 3)))
            case "number":
                return source.random.choice((0, 0.5, 1.0, source.random.uniform(-2, 4)))
            case "boolean":
                return source.chance(0.5)
            case "null":
                return None
        return source.odd()

    def _object(self, schema: Mapping[str, Any], odd: float, depth: int) -> dict[str, Any]:
        source = self._source
        required = schema.get("required", ())
        # Most bodies have few of the many fields, so that one that is refused hides no others.
        share = source.random.choice((0.0, 0.1, 0.3, MORE)) if depth < DEEPEST else 0.0
        drawn: dict[str, Any] = {}
        for name, each in schema.get("properties", {}).items():
            if name not in required and not source.chance(share):
                continue
            if name in self._likely and not source.chance(odd):
                drawn[name] = source.random.choice(self._likely[name])
            else:
                drawn[name] = self.value(each, odd=odd, depth=depth + 1)
        if source.chance(odd) or isinstance(schema.get("additionalProperties"), dict):
            drawn[source.text()] = source.odd()
        return drawn

    def _array(self, schema: Mapping[str, Any], odd: float, depth: int) -> list[Any]:
        if "prefixItems" in schema:
            return [self.value(each, odd=odd, depth=depth + 1) for each in schema["prefixItems"]]
        size = self._source.random.choice((0, 1, 1, 2, 4)) if depth < DEEPEST else 0
        items = schema.get("items", {})
        return [self.value(items, odd=odd, depth=depth + 1) for _ in range(size)]
