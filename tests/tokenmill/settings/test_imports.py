"""Commands and the API start without the libraries that load models."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["tokenmill.cli.main", "api.process", "tokenmill.settings.declarations"])
def test_no_library_of_the_engine_is_imported(module: str) -> None:
    code = f"import sys, {module}; print({{'torch', 'transformers', 'numpy'}} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "set()"
