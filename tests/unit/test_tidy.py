"""Style as a test: which package may import which, what importing loads, where printing is allowed, names that clash."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("protocol", "inference", "verifier", "trainer", "shardcast", "contracts", "environments", "models", "troth")
#: Arrows of docs/architecture.md: what each package may import of ours, besides itself.
ALLOWED = {
    "protocol": set(),
    "models": {"protocol"},
    "inference": {"protocol", "models"},
    "verifier": {"protocol", "models"},
    "trainer": {"protocol", "models"},
    "shardcast": {"protocol"},
    "contracts": {"protocol"},
    "environments": {"protocol"},
    "troth": set(PACKAGES),
}
MODULE_LINES_MAX = 420


def _modules(package: str) -> list[Path]:
    return [path for path in (ROOT / package).rglob("*.py") if "node_modules" not in path.parts]


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_arrows_point_one_way(package):
    for path in _modules(package):
        ours = _imports(path) & set(PACKAGES) - {package}
        assert ours <= ALLOWED[package], f"{path.relative_to(ROOT)} imports {ours - ALLOWED[package]}"


def _loaded(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return {name.split(".")[0] for name in done.stdout.split()}


def test_the_rules_load_no_heavy_package():
    modules = [
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for p in _modules("protocol")
    ]
    loaded = _loaded("import " + ", ".join(modules))
    assert not loaded & {"torch", "vllm", "web3", "transformers", "zmq", "aiohttp", "eth"}


@pytest.mark.parametrize(
    "statement",
    [
        "import troth.relay, troth.roles",
        "import troth.devnet",
        "import troth.cli",
        "import troth.judging, verifier.worker",
    ],
)
def test_roles_without_a_model_do_not_load_torch(statement):
    assert "torch" not in _loaded(statement)


def test_rules_have_no_clock_file_or_randomness():
    forbidden = {"time", "random", "secrets", "socket", "os", "asyncio", "threading", "datetime"}
    for path in _modules("protocol"):
        assert not _imports(path) & forbidden, path.name


@pytest.mark.parametrize("package", PACKAGES)
def test_only_the_command_line_prints(package):
    printing = {"troth/chooser.py", "troth/connect.py", "troth/roles.py"}
    for path in _modules(package):
        name = path.relative_to(ROOT).as_posix()
        if name in printing or name.startswith(("troth/demo/", "troth/cli/")):
            continue
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        assert not [n for n in calls if isinstance(n.func, ast.Name) and n.func.id == "print"], name


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_are_described_and_short(package):
    for path in _modules(package):
        text = path.read_text()
        if not text.strip():
            continue
        assert ast.get_docstring(ast.parse(text)), f"{path.relative_to(ROOT)} does not say what it is for"
        assert text.count("\n") <= MODULE_LINES_MAX, f"{path.relative_to(ROOT)} holds more than one idea"


def test_nothing_unsafe_reads_a_strangers_bytes():
    for package in PACKAGES:
        for path in _modules(package):
            text = path.read_text()
            assert "pickle" not in _imports(path), path
            assert "torch.load(" not in text, path
            assert "trust_remote_code=True" not in text, path


def test_import_names_are_ours_alone():
    from troth.doctor import find_shadowed

    assert find_shadowed() == {}
