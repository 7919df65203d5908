"""Every file and name that `docs/architecture.md` refers to exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tokenmill" / "protocol" / "store"
REFERENCE = re.compile(r"`([\w/]+\.(?:py|lua))(?::([\w.]+))?`")


def names_in(path: Path) -> set[str]:
    """Functions and classes of a module, methods as `Class.method`."""
    found = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


def missing(text: str) -> list[str]:
    lacking = []
    for file, name in REFERENCE.findall(text):
        path = (SCRIPTS if file.startswith("scripts/") else ROOT) / file
        if not path.is_file() or (name and name not in names_in(path)):
            lacking.append(f"{file}:{name}" if name else file)
    return lacking


def test_the_architecture_page_names_what_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    assert len(REFERENCE.findall(text)) > 40
    assert missing(text.replace("`engine.py`", "").replace("`build.py`, `plans.py`", "")) == []


def test_a_missing_file_or_name_is_found() -> None:
    text = "`engine/engine.py:Engine.step`, `engine/engine.py:Engine.leap`, `engine/gone.py`"
    assert missing(text) == ["engine/engine.py:Engine.leap", "engine/gone.py"]
