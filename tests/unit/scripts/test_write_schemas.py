"""The schemas in docs/schemas are those of the code, and know what files must and may hold."""

import importlib.machinery
import importlib.util
import pathlib
from types import ModuleType

import pytest

ROOT = pathlib.Path(__file__).parents[3]


def loaded() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader(
        "write_schemas", str(ROOT / "scripts" / "write_schemas")
    )
    spec = importlib.util.spec_from_loader("write_schemas", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


script = loaded()


@pytest.mark.parametrize("name", script.FORMATS)
def test_the_schemas_are_up_to_date(name: str) -> None:
    written = (ROOT / "docs" / "schemas" / f"{name}.json").read_text(encoding="utf-8")
    assert written == script.text(name), "run scripts/write_schemas"


def test_there_is_no_other_schema() -> None:
    files = {path.stem for path in (ROOT / "docs" / "schemas").iterdir()}
    assert files == set(script.FORMATS)


def test_a_schema_names_the_version_the_limits_and_no_other_keys() -> None:
    machine = script.schema("machine")["$defs"]["MachineFile"]
    assert machine["properties"]["version"] == {"const": 1}
    assert machine["additionalProperties"] is False
    assert machine["required"][:2] == ["version", "name"]
    ram = machine["properties"]["ram_bytes"]["anyOf"]
    assert ram[0] == {"type": "integer", "minimum": 1, "maximum": 2**63 - 1}
    assert ram[1]["type"] == "string"
