"""Imports run one way, and heavy or impure modules stay out of where they do not belong.

Read from the source by `ast`, so nothing is imported and imports inside functions count too.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Each package may import itself and what lies to its right.
LAYERS = ("mount", "replicator", "fs")
PYFUSE3_USERS = {"fs/fuse_ops.py", "mount/daemon.py", "mount/baseline_fs.py"}
PURE = ("fs/relay.py",)
BOTO3_USERS = {"fs/tiers/s3client.py"}
IMPURE_MODULES = {
    "os",
    "io",
    "socket",
    "select",
    "time",
    "trio",
    "threading",
    "subprocess",
    "random",
}


def sources() -> list[Path]:
    return sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports_of(path: Path) -> set[str]:
    """Dotted names of all modules a file imports; `from x import y` counts as x and as x.y."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += [node.module] if node.module else []
            origin = ".".join(base)
            found.add(origin)
            found.update(f"{origin}.{alias.name}" for alias in node.names)
    return found


def source_of(module: str) -> Path | None:
    """The file of one of our modules; None for names inside modules and for other people's."""
    base = ROOT.joinpath(*module.split("."))
    if base.with_suffix(".py").is_file():
        return base.with_suffix(".py")
    return base / "__init__.py" if (base / "__init__.py").is_file() else None


def all_ours(path: Path) -> set[Path]:
    """A file and every module of ours that it imports, directly or through others."""
    reached: set[Path] = set()
    waiting = [path]
    while waiting:
        current = waiting.pop()
        if current in reached:
            continue
        reached.add(current)
        for module in imports_of(current):
            # Importing a.b runs a/__init__.py as well.
            parts = module.split(".")
            for length in range(1, len(parts) + 1):
                found = source_of(".".join(parts[:length]))
                if found is not None and parts[0] in LAYERS:
                    waiting.append(found)
    return reached


def test_there_is_something_to_read():
    names = {name_of(path) for path in sources()}
    assert {"fs/relay.py", "fs/vfs.py", "mount/supervisor.py", "mount/cli.py"} <= names


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_imports_run_one_way(path):
    layer = path.relative_to(ROOT).parts[0]
    allowed = LAYERS[LAYERS.index(layer) :]
    wrong = {
        m for m in imports_of(path) if m.split(".")[0] in LAYERS and m.split(".")[0] not in allowed
    }
    assert not wrong, f"{name_of(path)} is in {layer} and imports {sorted(wrong)}"
    assert not any(module.split(".")[0] in ("tests", "examples") for module in imports_of(path))


def test_pyfuse3_only_at_the_boundary():
    users = {
        name_of(p) for p in sources() if any(m.split(".")[0] == "pyfuse3" for m in imports_of(p))
    }
    assert users <= PYFUSE3_USERS
    assert "fs/fuse_ops.py" in users


def test_boto3_only_behind_the_tier():
    for path in sources():
        modules = {m.split(".")[0] for m in imports_of(path)}
        assert not modules & {"boto3", "botocore"} or name_of(path) in BOTO3_USERS, name_of(path)


def test_the_supervisor_uses_the_standard_library_only():
    """It must start when nothing else does, and be readable in one sitting."""
    for path in all_ours(ROOT / "mount" / "supervisor.py"):
        foreign = (
            {m.split(".")[0] for m in imports_of(path)} - sys.stdlib_module_names - set(LAYERS)
        )
        assert not foreign, (
            f"{name_of(path)}, imported by the supervisor, imports {sorted(foreign)}"
        )


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_touch_nothing(name):
    for path in all_ours(ROOT / name):
        impure = {module.split(".")[0] for module in imports_of(path)} & IMPURE_MODULES
        assert not impure, f"{name_of(path)} imports {sorted(impure)}"


def test_nothing_unpickles_or_evaluates():
    """What comes from the network or the control socket must never become code."""
    for path in sources():
        modules = {module.split(".")[0] for module in imports_of(path)}
        assert not modules & {"pickle", "marshal", "shelve", "dill"}, name_of(path)
        calls = {
            node.func.id
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert not calls & {"eval", "exec"}, name_of(path)
