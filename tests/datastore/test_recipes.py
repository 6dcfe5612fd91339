from importlib import metadata
from pathlib import Path

import pytest

import retrieve_spec
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.sources import list_files, load_recipe
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.errors import BuildError

RECIPES = Path(retrieve_spec.__file__).parents[1] / "datastores"


def test_standard_library(tmp_path):
    recipe = load_recipe(RECIPES / "python-stdlib.toml")
    paths = {file.path for file in list_files(recipe.sources)}
    assert {"json/decoder.py", "os.py"} <= paths
    assert not any("/test/" in path or path.startswith("site-packages") for path in paths)
    assert recipe.sources[0].licence == "PSF-2.0"
    build_datastore(tmp_path / "s", list(recipe.sources), "reference", max_tokens=5_000, recipe=recipe.name)
    store = open_datastore(tmp_path / "s", tokenizer="reference")
    assert store.manifest.history[0]["recipe"] == "python-stdlib"
    assert store.document_at(0, 0).licence == "PSF-2.0"


def test_installed_packages_carry_their_names_and_licences():
    recipe = load_recipe(RECIPES / "installed-packages.toml", exclude=["click/**", "**/typing_extensions.py"])
    licences = {file.path: file.source.licence for file in list_files(recipe.sources) if not file.skip}
    assert "MIT" in licences["_pytest/main.py"]
    assert "numpy/ma/core.py" in licences
    assert not any(path.startswith("click/") or "typing_extensions" in path for path in licences)
    again = load_recipe(RECIPES / "installed-packages.toml", include=["click/**"])
    assert [s.path for s in again.sources] == [s.path for s in recipe.sources]
    assert {file.path.split("/")[0] for file in list_files(again.sources) if not file.skip} == {"click"}


def test_namespace_folders_belong_to_several_distributions(monkeypatch, tmp_path):
    for name, licence, files in (
        ("first", "MIT", ("shared/one/__init__.py", "shared/one/deep/a.py", "shared/loose.py")),
        ("second", "BSD-3-Clause", ("shared/two/__init__.py", "single.py", "../bin/tool.py")),
    ):
        about = tmp_path / f"{name}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nLicense-Expression: {licence}\n")
        (about / "RECORD").write_text("".join(f"{file},,\n" for file in files))
        for file in files:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text(f"name = {file!r}")
    monkeypatch.setattr(metadata, "distributions", lambda: metadata.Distribution.discover(path=[str(tmp_path)]))
    recipe = load_recipe(RECIPES / "installed-packages.toml")
    assert {file.path: file.source.licence for file in list_files(recipe.sources)} == {
        "shared/one/__init__.py": "MIT",
        "shared/one/deep/a.py": "MIT",
        "shared/loose.py": "MIT",
        "shared/two/__init__.py": "BSD-3-Clause",
        "single.py": "BSD-3-Clause",
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not toml at all", "could not read recipe"),
        ('name = "x"', r"\[\[source\]\]"),
        ('name = "x"\ncolour = 1\n[[source]]\npath = "."', "got colour"),
        ('name = "x"\n[[source]]\npath = "."\nlicense = "MIT"', "got license"),
        ('name = "x"\nsource = [1]', r"\[\[source\]\]"),
        ('[[source]]\npath = "."', "expected a name"),
        ('name = "x"\n[[source]]\nlicence = "MIT"', "a path, or distributions"),
    ],
)
def test_bad_recipes(tmp_path, content, message):
    (tmp_path / "r.toml").write_text(content)
    with pytest.raises(BuildError, match=message):
        load_recipe(tmp_path / "r.toml")
