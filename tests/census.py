"""The project's size in figures: `python -m tests.census` prints what `tests/test_census.py` holds to its table."""

import ast
import sys
from collections.abc import Container, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("decode", "distill", "train", "eval", "scripts")
LONGEST = 200
"""Characters of an error, a placeholder counting as 8: what, both values, what to do."""


def census() -> dict[str, int]:
    """Counts of the files as they stand; nothing of them is imported."""
    product = {path: path.read_text("utf-8") for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")}
    tests = [path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py")]
    trees = {_name(path): ast.parse(text) for path, text in product.items()}
    nodes = {name: list(ast.walk(tree)) for name, tree in trees.items()}
    return {
        "product files": len(product),
        "product lines": sum(text.count("\n") for text in product.values()),
        "tests files": len(tests),
        "tests lines": sum(text.count("\n") for text in tests),
        "settings": sum(_fields(node) for found in nodes.values() for node in found),
        "file circles": len(circles({name: set(_imported(found, nodes)) for name, found in nodes.items()})),
        "string subscripts in eval": sum(
            _by_string(node) for name, found in nodes.items() if name.split(".")[0] == "eval" for node in found
        ),
        f"errors over {LONGEST} characters": sum(_is_long(node) for found in nodes.values() for node in found),
    }


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules that reach each other; one that imports itself alone is none."""
    reach = {name: _reached(name, imports) for name in imports}
    found = {frozenset(other for other in reach[name] if name in reach[other]) for name in imports}
    return [set(group) for group in found if len(group) > 1]


def _reached(start: str, imports: dict[str, set[str]]) -> set[str]:
    found, new = set(), {start}
    while new:
        new = {other for name in new for other in imports[name]} - found
        found |= new
    return found


def _imported(nodes: list[ast.AST], modules: Container[str]) -> Iterator[str]:
    """Modules of the project that one names, in annotations alone and late imports too."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in modules or node.module in modules:
                    yield name if name in modules else node.module


def _fields(node: ast.AST) -> int:
    """Documented fields of a configuration class: what docs/reference/settings.md lists."""
    if not isinstance(node, ast.ClassDef) or not node.name.endswith("Config"):
        return 0
    pairs = zip(node.body, node.body[1:], strict=False)
    return sum(_is_field(one) and _is_string(getattr(two, "value", None)) for one, two in pairs)


def _is_field(node: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.dump(node.annotation)


def _by_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and _is_string(node.slice)


def _is_long(node: ast.AST) -> bool:
    """Of what is raised, by `raise` or by `require`."""
    is_raised = isinstance(node, ast.Raise) or getattr(getattr(node, "func", None), "id", None) == "require"
    call = getattr(node, "exc", node)
    return is_raised and isinstance(call, ast.Call) and any(_length(one) > LONGEST for one in call.args)


def _length(text: ast.expr) -> int:
    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
    return sum(len(str(part.value)) if isinstance(part, ast.Constant) else 8 for part in parts)


def _is_string(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


if __name__ == "__main__":
    sys.stdout.write("\n".join(f"{name}: {count}" for name, count in census().items()) + "\n")
