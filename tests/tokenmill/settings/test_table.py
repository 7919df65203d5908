"""The page of settings in the documentation is the one that the code writes."""

from pathlib import Path

from tokenmill.settings.declarations import VARIABLES
from tokenmill.settings.table import settings_page

PAGE = Path(__file__).parents[3] / "docs" / "settings.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == settings_page(), (
        "run: .venv/bin/python -m tokenmill.settings.table > docs/settings.md"
    )


def test_the_page_has_every_setting_once() -> None:
    page = settings_page()
    assert [name for name in VARIABLES if page.count(f"| `{name}` |") != 1] == []
