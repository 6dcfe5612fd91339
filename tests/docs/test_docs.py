"""The documentation says what the code says, and the code it shows runs."""

import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import generate_docs
import pytest

import retrieve_spec
from retrieve_spec import cli
from retrieve_spec.reference_model import reference_path

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")),
]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def test_generated_parts_are_current():
    stale = [str(path.relative_to(ROOT)) for path in generate_docs.stale()]
    assert not stale, f"out of date: {', '.join(stale)}; run `make docs`"


def test_every_option_of_every_config_is_described():
    classes = generate_docs.config_classes()
    assert classes
    for cls in classes:
        described = generate_docs.attributes(cls)
        assert set(described) == {field.name for field in dataclasses.fields(cls)}, cls.__name__
        assert all(described.values()), cls.__name__


def test_every_environment_variable_in_the_code_is_documented():
    used = set()
    for path in (ROOT / "retrieve_spec").rglob("*.py"):
        used |= set(re.findall(r"\bRETRIEVE_SPEC_[A-Z_]+\b", path.read_text()))
    assert used <= set(generate_docs.ENVIRONMENT), f"undocumented: {used - set(generate_docs.ENVIRONMENT)}"


def test_modules_that_pages_of_the_inside_name_are_there():
    modules = {f"/{path.relative_to(ROOT)}" for path in ROOT.glob("[!.]*/**/*.py")}
    for page in ("architecture", "drafting", "verifier"):
        text = (ROOT / "docs" / f"{page}.md").read_text()
        for name in re.findall(r"(?<![\w/.*…-])\w[\w/]*\.py\b", text):
            assert any(module.endswith(f"/{name}") for module in modules), f"{page} names {name}"


def test_the_first_page_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES)
def test_links_to_files_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
        if "://" not in target:
            other = (ROOT / page).parent / target if target else ROOT / page
            assert other.exists(), f"{page} links to {target}"
            assert not anchor or anchor in headings(other), f"{page} links to {target}#{anchor}"


def headings(page: Path) -> set[str]:
    """What a link can name of a page, as the site and GitHub make it of headings without a formula."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def test_every_name_of_the_package_is_in_the_api():
    page = (ROOT / "docs" / "api.md").read_text()
    described = set(re.findall(r"^::: .*\.(\w+)$", page, re.MULTILINE))
    assert set(retrieve_spec.__all__) - {"__version__"} <= described


HERE = ("README.md", "docs/start.md", "docs/howto.md")
"""Pages whose Python reads files of the checkout."""


@pytest.mark.threads
@pytest.mark.parametrize("page", [*HERE, "docs/datastores.md", "docs/engines.md", "docs/rollouts.md"])
def test_python_of_the_pages_runs(page, monkeypatch, tmp_path):
    """One block after another, as a reader would type them, but for what needs another package (`make test-trl`)."""
    monkeypatch.chdir(ROOT if page in HERE else tmp_path)
    for name in ("src", "docs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shelf.py").write_text(f"class Shelf:\n    def {name}(self):\n        return []\n")
    space: dict[str, object] = {}
    for block in blocks(page, "python"):
        if "trl" not in block:
            exec(compile(places(block, tmp_path / "bucket"), page, "exec"), space)
            if (tmp_path / "mystore").exists():
                assert cli.run(["push", "mystore", f"file://{tmp_path}/bucket/mystore"]) == 0
    assert page != "README.md" or "speculation" not in vars(space["model"])


@pytest.mark.parametrize("number", [0, 1])
def test_a_model_of_ones_own_is_loaded_as_the_page_says(number):
    """The block has a name to fill in: here it is the bundled model's folder."""
    block = [block for block in blocks("docs/howto.md", "text") if "path/or/name" in block][number]
    space: dict[str, object] = {}
    exec("import retrieve_spec as rs\nfrom transformers import AutoModelForCausalLM, AutoTokenizer", space)
    exec(block.replace("path/or/name", str(reference_path())).replace(', device_map="auto"', ""), space)
    assert "speculation" in vars(space["model"])


RUN = {
    "README.md": ["generate", "build", "generate"],
    "docs/start.md": ["doctor", "build", "generate"],
    "docs/datastores.md": ["build", "generate", "push", "pull", "build"],
    "docs/benchmarks.md": ["bench", "bench"],
}
"""Commands that pages show and a test runs, in order; others need a container, a service, or wait for an editor."""
ALSO = {"generate": "--device cpu", "bench": "--device cpu --limit 1 --max-new-tokens 8 --quiet"}
NAMES = {"MODEL": "reference", "PATH_OR_HUB_ID": "reference", "slurm:PARTITION": "local:1"}
"""What stands for a name that a reader fills in."""


def places(text: str, bucket: Path) -> str:
    """A folder in the place of an object store."""
    return text.replace("s3://bucket", f"file://{bucket}")


SLOW = ("docs/datastores.md", "docs/benchmarks.md")


@pytest.mark.usefixtures("loaded_once")
@pytest.mark.parametrize("page", [pytest.param(page, marks=[pytest.mark.slow] * (page in SLOW)) for page in RUN])
def test_commands_of_the_pages_run(page, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("retrieve_spec.cli_machine.TOKENS", 8)
    for name in ("src", "bucket/text"):
        (tmp_path / name).mkdir(parents=True)
        shutil.copy(ROOT / "retrieve_spec" / "bench" / "machine.py", tmp_path / name)
    (tmp_path / "notes.jsonl").write_text('{"text": "Shelves hold books."}\n')
    (tmp_path / "my.jsonl").write_text('{"prompt": "import os"}\n')
    ran = []
    for line in "".join(blocks(page, "bash")).splitlines():
        words = [NAMES.get(word, word) for word in shlex.split(places(line, tmp_path / "bucket"), comments=True)]
        if words[:1] == ["retrieve-spec"] and words[1] in RUN[page]:
            if words[1] in ("build", "bench"):  # each block begins anew
                shutil.rmtree(tmp_path / "mystore", ignore_errors=True)
                shutil.rmtree(tmp_path / "bench-out", ignore_errors=True)
            assert cli.run([*words[1:], *ALSO.get(words[1], "").split()]) == 0, line
            ran.append(words[1])
    assert ran == RUN[page]
    assert page != "README.md" or "identical: yes" in capsys.readouterr().err


def test_completion_of_commands_is_printed(tmp_path):
    (block,) = (block for block in blocks("docs/howto.md", "text") if "COMPLETE" in block)
    program = f'retrieve-spec() {{ "{sys.executable}" -c "from retrieve_spec.cli import main; main()"; }}'
    check = f"{program}; {block}complete -p retrieve-spec"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", check], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "retrieve-spec" in done.stdout


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_the_docs_exist(page):
    import click

    for block in blocks(page, "bash"):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["retrieve-spec"] and len(words) > 1:
                command = cli.cli.get_command(click.Context(cli.cli), words[1])
                assert command is not None, line
                if isinstance(command, click.Group):
                    command = command.get_command(click.Context(command), words[2])
                known = {option for parameter in command.params for option in parameter.opts}
                assert {word for word in words if word.startswith("--")} <= known, line


def test_make_targets_in_the_docs_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"\bmake ([a-z][a-z-]+)\b", "\n".join(blocks(page, "bash"))):
            assert target in targets, f"{page}: make {target}"


def test_every_table_has_its_place_in_one_page():
    placed = [match["name"] for page in PAGES for match in generate_docs.PART.finditer((ROOT / page).read_text())]
    assert sorted(placed) == sorted(generate_docs.PARTS)


def test_every_data_file_names_its_machine_and_command():
    for path in (ROOT / "docs" / "data").glob("*.json"):
        made = json.loads(path.read_text(encoding="utf-8"))
        facts = made.get("header", made)
        assert facts["command"], path.name
        assert {"processor", "cores", "packages", "commit", "date"} <= set(facts["machine"]), path.name
