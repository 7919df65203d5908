"""A contract for import-linter that lists what may be imported; its own types list what may not.

Anything that a contract does not name is refused. Only direct imports are checked: if every room is closed,
no chain can lead out.
"""

import sys
from typing import cast

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class OnlyContract(Contract):
    """`source_modules` import each other, `allowed_modules`, the standard library, and nothing else.

    Each name stands for the module and everything below it. `except_modules`, below a source, belong to other
    contracts: they are no sources here, and may not be imported unless they are allowed.
    """

    type_name = "only"

    source_modules = fields.ListField(subfield=fields.StringField())
    except_modules = fields.ListField(subfield=fields.StringField(), required=False)
    allowed_modules = fields.ListField(subfield=fields.StringField(), required=False)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Kept if no source imports anything that is not named."""
        own, excepted = _names(self.source_modules), _names(self.except_modules)
        allowed = [*_names(self.allowed_modules), *sys.stdlib_module_names]

        def belongs(module: str) -> bool:
            return _is_below(module, own) and not _is_below(module, excepted)

        broken = [
            (importer, imported)
            for importer in sorted(filter(belongs, graph.modules))
            for imported in sorted(graph.find_modules_directly_imported_by(importer))
            if not belongs(imported) and not _is_below(imported, allowed)
        ]
        return ContractCheck(kept=not broken, metadata={"broken": broken})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for importer, imported in check.metadata["broken"]:
            output.print_error(f"{importer} imports {imported}, which this contract does not allow")


def _names(value: object) -> list[str]:
    """A field's value at run time, which import-linter's types show as the field itself."""
    return [] if value is None else list(cast(list[str], value))


def _is_below(module: str, roots: list[str]) -> bool:
    return any(module == root or module.startswith(f"{root}.") for root in roots)
