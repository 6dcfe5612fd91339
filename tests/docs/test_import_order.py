"""Imports flow one way: from the kernels up to the commands."""

import ast
from collections.abc import Iterator
from pathlib import Path

import retrieve_spec

PACKAGE = Path(retrieve_spec.__file__).parent
ORDER = [
    {"_version", "errors", "openmp", "processors"},
    {"config", "model_layers"},
    {"model_files"},
    {"kernels"},
    {"quantized"},
    {"quantized_checkpoints"},
    {"reference_model"},
    {"datastore"},
    {"sources"},
    {"drafting"},
    {"attention", "sampling"},
    {"verify"},
    {"recorded"},
    {"engine"},
    {"generation"},
    {"acceleration"},
    {"teachers"},
    {"distilling"},
    {"__init__"},
    {"cli_common"},
    {"server", "bench", "integrations"},
    {"demo"},
    {"cli_generate", "cli_serve", "cli_store"},
    {"cli_chat", "cli_distil", "cli_machine"},
    {"cli"},
]
"""Rooms from the bottom up; those of one floor do not know each other."""
FLOOR = {room: floor for floor, rooms in enumerate(ORDER) for room in rooms}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_rooms(path: Path) -> Iterator[tuple[int, str]]:
    """(line, room) of every import of the package in a file, those for type checkers and inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            whole = node.module == "retrieve_spec"
            names = [f"{node.module}.{alias.name}" for alias in node.names] if whole else [node.module]
        for name in names:
            package, _, rest = name.partition(".")
            if package == "retrieve_spec":
                room = rest.partition(".")[0]
                yield node.lineno, room if room in FLOOR else "__init__"


def imported_modules(path: Path) -> set[str]:
    """Modules of the package that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("retrieve_spec."):
            found.add(node.module.removeprefix("retrieve_spec."))
    return found


def test_arithmetic_on_a_cpu_has_one_door_and_knows_no_draft() -> None:
    cpu = PACKAGE / "kernels" / "cpu"
    for path in sorted(PACKAGE.rglob("*.py")):
        modules = imported_modules(path)
        if path.is_relative_to(cpu):
            known = {"kernels.compiled_code", "kernels.vector_math", "kernels.views", "openmp"}
            assert {name for name in modules if not name.startswith("kernels.cpu")} <= known, path
        else:
            assert not any(name.startswith("kernels.cpu.") for name in modules), path


def test_every_room_has_its_floor() -> None:
    assert {room_of(path) for path in PACKAGE.rglob("*.py")} == set(FLOOR)


def test_imports_flow_one_way() -> None:
    upwards = [
        f"{path.relative_to(PACKAGE)}, line {line}: imports {room}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, room in imported_rooms(path)
        if room != room_of(path) and FLOOR[room] >= FLOOR[room_of(path)]
    ]
    assert not upwards
