"""Rules of the repository: docs name existing things, versions agree, files and folders stay small."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream import __version__

ROOT = Path(__file__).resolve().parent.parent
TOP_LEVEL = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
DOCS = sorted(
    [
        path
        for pattern in ("*.md", "docs/**/*.md", "models/*.md", "deploy/**/*.md")
        for path in ROOT.glob(pattern)
        if path.name != "0000-template.md"
    ]
)
MAX_FILE_LINES = 400
MAX_FOLDER_MODULES = 16
MAX_DECISION_WORDS = 300
MAX_WORDS = {
    "README.md": 800,
    "docs/performance.md": 2400,
    "CHANGELOG.md": 1500,
    "ARCHITECTURE.md": 3000,
    "docs/security.md": 2300,
    "docs/http-api.md": 2400,
}
MAX_FUNCTION_LINES = 60
# Files whose functions may be longer, with the reason.
LONG_FUNCTIONS = {
    "libs/engine/kernels/gpu/mla_decode.py": "a Triton kernel is one function; its launch names 26 arguments",
    "libs/engine/kernels/gpu/mla_prefill.py": "a Triton kernel is one function",
}
# Names in docs that look like classes here: of systemd, and of OpenAI's client.
FOREIGN_CLASSES = {"LimitMEMLOCK", "LengthFinishReasonError"}
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
PRODUCT = ("services", "libs", "slipstream", "supervisor")
OWN_CODE = (*PRODUCT, "bench", "models")


def _backticked(text: str) -> Iterator[str]:
    without_fences = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    yield from re.findall(r"`([^`\n]+)`", without_fences)


def _path_exists(span: str) -> bool:
    path = span.split(":")[0].rstrip("/")
    return any(ROOT.glob(path)) if "*" in path else (ROOT / path).exists()


def _name_exists(dotted: str) -> bool:
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:cut])
        source = base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__init__.py"
        if source.is_file():
            rest = parts[cut:]
            text = source.read_text()
            return all(re.search(rf"\b{re.escape(name)}\b", text) for name in rest)
    return False


@pytest.mark.parametrize("doc", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_and_names_in_docs_exist(doc: Path) -> None:
    missing = []
    for span in _backticked(doc.read_text()):
        first = span.split("/")[0]
        if "/" in span and first in TOP_LEVEL and re.fullmatch(r"[\w./*:-]+", span):
            if not _path_exists(span):
                missing.append(span)
        elif re.fullmatch(r"test_[\w*]+\.py", span):  # a test file without its folder
            if not any(ROOT.glob(f"tests/**/{span}")):
                missing.append(span)
        elif re.fullmatch(
            r"(libs|services|slipstream|supervisor|models|bench)(\.\w+)+", span
        ) and not _name_exists(span):
            missing.append(span)
    assert not missing, f"{doc.name} names what does not exist: {missing}"


def _base_name(base: ast.expr) -> str:
    """The name of a base class, without its module and its type arguments."""
    while isinstance(base, ast.Subscript):
        base = base.value
    return base.attr if isinstance(base, ast.Attribute) else ast.unparse(base)


def _definitions(statements: list[ast.stmt]) -> Iterator[Definition]:
    """Every class or function of these statements, at any depth; no expression is visited, which is most of
    a tree."""
    for statement in statements:
        if isinstance(statement, Definition):
            yield statement
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from _definitions(getattr(statement, name, []))


@functools.cache
def _methods_of_product() -> dict[str, set[str]]:
    """The methods of each class, those of its bases in the product included."""
    own: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for path in _own_sources():
        if path.relative_to(ROOT).parts[0] not in PRODUCT:
            continue
        for node in _definitions(_tree(path).body):
            if not isinstance(node, ast.ClassDef):
                continue
            defined = (n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
            own.setdefault(node.name, set()).update(defined)
            bases.setdefault(node.name, set()).update(_base_name(base) for base in node.bases)

    def methods(name: str) -> set[str]:
        return own.get(name, set()).union(*(methods(base) for base in bases.get(name, ()) if base != name))

    return {name: methods(name) for name in own}


def _wrong_pairs(text: str) -> set[str]:
    """The pairs `Class.method` of a text whose class has no such method, inherited or not."""
    methods = _methods_of_product()
    named = set(re.findall(r"\b([A-Z][a-zA-Z]+)\.(?!md\b)([a-z_]\w+)", text))
    assert len(named) > 50
    return {f"{c}.{f}" for c, f in named if f not in methods.get(c, set())}


def test_functions_in_the_chains_of_the_architecture_exist() -> None:
    """The chains name methods as `Class.method`, and each is a method of that class."""
    assert _wrong_pairs((ROOT / "ARCHITECTURE.md").read_text()) == set()


def test_a_method_of_another_class_in_the_chains_is_found() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert _wrong_pairs(text + "DecodeClient.push, OutputProcessor.dispatch, PrefillJob.end") == {
        "DecodeClient.push",
        "OutputProcessor.dispatch",
    }


@functools.cache
def _words_of_code() -> frozenset[str]:
    """The words of all sources outside of backticks, and of the contract."""
    sources = [*_own_sources(), *(ROOT / "protos").rglob("*.proto")]
    return frozenset(
        word for path in sources for word in re.findall(r"\w+", re.sub(r"`[^`\n]+`", "", path.read_text()))
    )


def _lost_classes(text: str) -> set[str]:
    """The class names of a text's backticks that are nowhere in the code."""
    named = set(re.findall(r"`([A-Z][a-z]+[A-Z]\w*)", text))
    return named - _words_of_code() - FOREIGN_CLASSES


def test_classes_that_docstrings_and_docs_name_exist() -> None:
    texts = {path: path.read_text() for path in [*_own_sources(), *DOCS] if path != Path(__file__)}
    lost = {str(path.relative_to(ROOT)): _lost_classes(text) for path, text in texts.items()}
    assert {path: names for path, names in lost.items() if names} == {}


def test_a_class_that_is_nowhere_is_found() -> None:
    gone = "Request" + "Surround"
    assert _lost_classes(f"`{gone}` guards what `RequestMiddleware` and `{gone}.serve` do.") == {gone}


def _lost_steps(text: str) -> set[str]:
    """The methods and functions of a text's chains (`a -> B.c`) that are nowhere in the code."""
    chains = "\n".join(line for line in text.splitlines() if "-> " in line)
    methods = _methods_of_product()
    pairs = re.findall(r"\b([A-Z][a-zA-Z]+)\.(?!md\b)([a-z_]\w+)", chains)
    functions = set(re.findall(r"(?<![\w./-])[a-z]+(?:_[a-z]+)+\b(?![./])", chains))
    return {f"{c}.{f}" for c, f in pairs if f not in methods.get(c, set())} | functions - _words_of_code()


@pytest.mark.parametrize("doc", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_steps_of_chains_exist(doc: Path) -> None:
    assert _lost_steps(doc.read_text()) == set()


def test_a_lost_step_is_found() -> None:
    gone = "receive" + "_steps"
    chain = f"run  {gone} -> RankModel.run, or RankModel.{gone} -> send_step"
    assert _lost_steps(chain) == {gone, f"RankModel.{gone}"}


def test_make_verbs_in_docs_exist() -> None:
    verbs = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {doc.name: set(re.findall(r"`make ([a-z0-9-]+)`", doc.read_text())) for doc in DOCS}
    assert any(named.values())
    assert {doc: found - verbs for doc, found in named.items() if found - verbs} == {}


def test_the_changelog_starts_with_the_version_of_the_project() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.search(r"^## \[?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == version


def test_both_packages_have_the_version_of_the_sdk() -> None:
    sdk = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    server = tomllib.loads((ROOT / "server" / "pyproject.toml").read_text())["project"]
    assert sdk["version"] == server["version"] == __version__
    assert f"slipstream=={__version__}" in server["dependencies"]


def _tracked(folder: str = "") -> list[Path]:
    """Return the project's files in a folder; in an unpacked archive, all outside of hidden folders."""
    if not (ROOT / ".git").exists():
        tops = [ROOT / folder] if folder else [ROOT / name for name in sorted(TOP_LEVEL)]
        return [path for top in tops for path in top.rglob("*") if path.is_file()]
    listed = subprocess.run(
        # A checkout may belong to another user than the tests run as.
        ["git", "-c", "safe.directory=*", "ls-files", "--", folder or "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def _own_sources() -> list[Path]:
    return [path for path in _tracked() if path.suffix == ".py" and "_pb2" not in path.name]


def test_no_file_exceeds_its_line_limit() -> None:
    long = {
        str(p.relative_to(ROOT)): n
        for p in _own_sources()
        if (n := len(p.read_text().splitlines())) > MAX_FILE_LINES
    }
    assert not long


def test_a_decision_is_short() -> None:
    words = {path.name: len(path.read_text().split()) for path in ROOT.glob("docs/adr/0*.md")}
    assert words
    assert {name: n for name, n in words.items() if n > MAX_DECISION_WORDS} == {}


def test_the_table_of_decisions_names_every_page() -> None:
    pages = [path for path in sorted(ROOT.glob("docs/adr/0*.md")) if path.name != "0000-template.md"]
    heads = [path.read_text().split("\n", 1)[0] for path in pages]
    table = (ROOT / "docs/adr/README.md").read_text()
    rows = re.findall(r"^\| (\d{4}) \| (.+?) \|", table, flags=re.MULTILINE)
    assert [f"# {number}: {title}" for number, title in rows] == heads
    assert [path.name[:4] for path in pages] == [number for number, _ in rows]


def test_every_reference_to_a_decision_has_its_page() -> None:
    numbers = {int(path.name[:4]) for path in ROOT.glob("docs/adr/0*.md")}
    suffixes = {".py", ".md", ".proto", ".toml", ".yaml", ".yml", ".c", ".h", ".js", ".sh"}
    readers = [path for path in _tracked() if path.suffix in suffixes or path.name == "Makefile"]
    pattern = re.compile(r"(?:\bADR |docs/adr/)(\d+)")
    named = {(int(n), path.name) for path in readers for n in pattern.findall(path.read_text())}
    assert len(named) > 20
    assert sorted((n, name) for n, name in named if n not in numbers) == []


@pytest.mark.parametrize("page", MAX_WORDS)
def test_a_page_has_at_most_so_many_words(page: str) -> None:
    """The lines of tables are no words."""
    words = [word for word in (ROOT / page).read_text().split() if re.search(r"\w", word)]
    assert len(words) <= MAX_WORDS[page]


def test_a_cell_of_the_performance_page_has_one_figure() -> None:
    """Cells with words, as heads and commands have, may have several."""
    rows = [line for line in (ROOT / "docs/performance.md").read_text().splitlines() if line.startswith("|")]
    numbers = re.compile(r"\d[\d,.]*(?:e-?\d+)?")
    figures = [cell for row in rows for cell in row.split("|")[2:] if re.fullmatch(r"[^`a-df-zA-Z]*", cell)]
    assert len(figures) > 300
    assert [cell for cell in figures if len(numbers.findall(cell)) > 1] == []


def test_no_folder_exceeds_its_file_limit() -> None:
    modules = Counter(path.relative_to(ROOT).parent for path in _own_sources() if path.name != "__init__.py")
    crowded = {str(folder): n for folder, n in modules.items() if n > MAX_FOLDER_MODULES}
    assert not crowded


def test_no_function_exceeds_its_line_limit() -> None:
    """Tests are not bounded."""
    long: dict[str, list[str]] = {}
    for path in _own_sources():
        name = str(path.relative_to(ROOT))
        for node in _definitions(_tree(path).body) if not name.startswith("tests/") else ():
            n_lines = (node.end_lineno or 0) - node.lineno + 1
            if n_lines > MAX_FUNCTION_LINES and not isinstance(node, ast.ClassDef):
                long.setdefault(name, []).append(node.name)
    assert long.keys() >= LONG_FUNCTIONS.keys(), "an exemption that no function needs"
    assert {name: found for name, found in long.items() if name not in LONG_FUNCTIONS} == {}


def test_a_public_class_name_exists_once() -> None:
    homes: dict[str, list[str]] = {}
    for path in _own_sources():
        if path.relative_to(ROOT).parts[0] in OWN_CODE:
            for node in _tree(path).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_no_private_class_has_the_name_of_a_public_one() -> None:
    """Neither in the file of the public class nor in another one of the product."""
    classes = [
        (node.name, str(path.relative_to(ROOT)))
        for path in _own_sources()
        if path.relative_to(ROOT).parts[0] in PRODUCT
        for node in _definitions(_tree(path).body)
        if isinstance(node, ast.ClassDef)
    ]
    public = {name for name, _ in classes if not name.startswith("_")}
    twins = [(name, path) for name, path in classes if name.startswith("_") and name.lstrip("_") in public]
    assert twins == []


def test_every_package_has_a_docstring() -> None:
    stated = ("services", "libs", "bench", "models")
    packages = [path for path in _own_sources() if path.name == "__init__.py"]
    packages = [path for path in packages if path.relative_to(ROOT).parts[0] in stated]
    assert packages
    assert [
        str(p.relative_to(ROOT)) for p in packages if not ast.get_docstring(ast.parse(p.read_text()))
    ] == []


def test_a_docstring_begins_with_what_is_understood_alone() -> None:
    """It does not refer to the definition above, or leave out what it is about."""
    referring = re.compile(r"(The same|Of|Those|These|That|They|Its|Their|All of them|None)\b")
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in _own_sources()
        if path.relative_to(ROOT).parts[0] in PRODUCT
        for node in _definitions(_tree(path).body)
        if referring.match(ast.get_docstring(node) or "")
    ]
    assert not found


def test_no_unsafe_function_is_called() -> None:
    unsafe = re.compile(r"\b(pickle\.|torch\.load\(|yaml\.load\(|(?<![\w.])eval\(|(?<![\w.])exec\()")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in _own_sources()
        if path != Path(__file__)
        if unsafe.search(text := path.read_text())
        for number, line in enumerate(text.splitlines(), 1)
        if unsafe.search(line)
    ]
    assert not found


def test_the_shipped_models_stay_within_their_size_limit() -> None:
    total_bytes = sum(path.stat().st_size for path in _tracked("models"))
    assert total_bytes <= 25 * 1024 * 1024
