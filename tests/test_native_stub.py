"""The typed stub of the native module says what the module says about itself: names, arguments,
their order and defaults, results."""

import ast
import pathlib

import pytest

from lohan import _native

STUB = pathlib.Path(__file__).parents[1] / "src" / "lohan" / "_native.pyi"


def plain(function: ast.FunctionDef) -> str:
    """A signature without its name and body, in one spelling."""
    function.name = "f"
    function.decorator_list = []
    function.body = [ast.Expr(ast.Constant(...))]
    text = ast.unparse(function)
    return text.replace("collections.abc.Sequence", "list").replace("lohan._native.", "")


def of_native(function: object) -> str:
    """What the module says about a function."""
    ((signature, _, defaults),) = function.__nb_signature__  # type: ignore[attr-defined]
    for number, value in enumerate(defaults or ()):
        signature = signature.replace(f"\\{number}", repr(value))
    if signature.startswith("def ("):  # getters have no name
        signature = signature.replace("def (", "def f(", 1)
    (parsed,) = ast.parse(f"{signature}: ...").body
    assert isinstance(parsed, ast.FunctionDef)
    return plain(parsed)


def members(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    return {
        node.target.id if isinstance(node, ast.AnnAssign) else node.name: node  # type: ignore[union-attr]
        for node in body
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AnnAssign)
    }


STUBBED = members(ast.parse(STUB.read_text()).body)
CLASSES = {name: node for name, node in STUBBED.items() if isinstance(node, ast.ClassDef)}


def test_the_stub_names_what_the_module_has_and_nothing_else() -> None:
    assert set(STUBBED) == {name for name in vars(_native) if not name.startswith("_")}
    assert ast.unparse(STUBBED["LEAF_ELEMENTS"]) == "LEAF_ELEMENTS: int"
    assert type(_native.LEAF_ELEMENTS) is int


@pytest.mark.parametrize(
    "name", [name for name, node in STUBBED.items() if isinstance(node, ast.FunctionDef)]
)
def test_a_function_of_the_stub_has_the_signature_of_the_module(name: str) -> None:
    node = STUBBED[name]
    assert isinstance(node, ast.FunctionDef)
    assert plain(node) == of_native(getattr(_native, name))


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_of_the_stub_has_the_members_of_the_module(name: str) -> None:
    native = vars(getattr(_native, name))
    stubbed = members(CLASSES[name].body)
    # The buffer protocol has no method before Python 3.12.
    stubbed.pop("__buffer__", None)
    assert {member for member in stubbed if not member.startswith("__")} == {
        member for member in native if not member.startswith("__")
    }
    for member, node in stubbed.items():
        assert isinstance(node, ast.FunctionDef)
        is_property = any(ast.unparse(one) == "property" for one in node.decorator_list)
        found = native[member]
        assert isinstance(found, property) == is_property, member
        said = of_native(found.fget if is_property else found)
        assert plain(node) == said, member
