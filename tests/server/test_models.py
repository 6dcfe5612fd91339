"""Several models behind one address: by name, loaded when first asked for."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from waiting import HANG_S, wait_for

from retrieve_spec.config import ServeConfig
from retrieve_spec.errors import ServeError
from retrieve_spec.server.app import create_app
from retrieve_spec.server.guard import Metrics
from retrieve_spec.server.models import Model, Models, named
from retrieve_spec.server.service import Service

HELLO = [{"role": "user", "content": "hello"}]


class Several:
    """A server of scripted models, each of which says its name; `a` is the first."""

    def __init__(self, live, say, tokenizer, names="abc", *, keys=(), config=ServeConfig(), **options):  # noqa: B008
        self.loads, self.broken, self.gate = [], set(), threading.Semaphore(1000)
        metrics = Metrics()

        def load(name):
            self.loads.append(name)
            self.gate.acquire()
            if name in self.broken:
                raise RuntimeError("/home/somebody/weights are damaged")
            return Service(say(f"I am {name}"), tokenizer, name, config, shared=bool(keys), metrics=metrics)

        models = {name: Model(lambda name=name: load(name)) for name in names}
        self.models = Models(models, config, metrics, **options)
        self.server = live(None, service="its models'", app=create_app(self.models, keys=keys))

    def ask(self, name, **fields):
        return self.server.post("/v1/chat/completions", {"model": name, "messages": HELLO, **fields})

    def said(self, name):
        return self.ask(name).json()["choices"][0]["message"]["content"]

    @property
    def states(self):
        return self.server.client.get("/health").json()["models"]


@pytest.fixture
def several(live, say, tokenizer):
    return lambda **options: Several(live, say, tokenizer, **options)


def test_a_server_is_idle_when_none_of_its_models_has_work(several):
    s = several()
    assert s.said("b") == "I am b"
    wait_for(s.models.are_idle)
    gate = s.models.models["b"].service.backend.gate = threading.Semaphore(0)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(s.said, "b")
        wait_for(lambda: not s.models.are_idle())
        gate.release(1000)
        assert asked.result(HANG_S) == "I am b"
    wait_for(s.models.are_idle)


def test_a_request_names_its_model(several):
    s = several()
    assert s.states == {"a": "loaded", "b": "unloaded", "c": "unloaded"}
    for name in ("a", "", None, "default", "a-Fast-Apply"):
        assert s.said(name) == "I am a"
    assert s.said("b") == "I am b" and s.loads == ["a", "b"]
    listed = s.server.client.get("/v1/models").json()["data"]
    listed = {model["id"]: model["status"]["value"] for model in listed if "-Fast-Apply" not in model["id"]}
    assert listed == {"a": "loaded", "b": "loaded", "c": "unloaded"}
    assert s.server.client.head("/v1/models/c").status_code == 200
    assert s.server.client.get("/props", params={"model": "b"}).json()["model_alias"] == "b"
    assert s.server.client.get("/props").json()["model_alias"] == "a"
    assert s.server.post("/infill", {"input_prefix": "x", "input_suffix": ""}).json()["model"] == "a"
    assert "/v1/messages" in s.server.client.get("/openapi.json").json()["paths"]


@pytest.mark.parametrize("name", ["d", 5, ["a"], "A"])
def test_another_name_is_404(several, name):
    s = several()
    for stream in (False, True):
        raw = s.ask(name, stream=stream)
        assert raw.status_code == 404 and "there are a, b, c" in raw.json()["error"]["message"]
    assert s.server.client.get(f"/v1/models/{name}").status_code == 404
    assert s.loads == ["a"]


def test_who_waits_for_a_model_is_answered_and_only_so_many_may_wait(several):
    s = several(config=ServeConfig(max_queue=3))
    s.gate = threading.Semaphore(0)
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(s.said, "b") for _ in range(3)]
        wait_for(lambda: s.models._waiting == 3)
        raw = s.ask("b")
        assert raw.status_code == 503 and raw.headers["retry-after"] == "1"
        assert s.states["b"] == "loading" and s.said("a") == "I am a"
        s.gate.release(1)
        assert {one.result(HANG_S) for one in asked} == {"I am b"}
    assert s.loads == ["a", "b"]


def test_a_model_that_cannot_be_loaded_fails_its_own_requests(several):
    s = several()
    s.broken.add("b")
    raw = s.ask("b")
    assert raw.status_code == 500 and "could not be loaded" in raw.json()["error"]["message"]
    assert "somebody" not in raw.text
    assert s.states == {"a": "loaded", "b": "failed", "c": "unloaded"} and s.said("a") == "I am a"
    s.broken.clear()
    assert s.said("b") == "I am b"


def test_keys_guard_all_models_and_forgetting_is_of_all(several):
    s = several(keys=(b"one",))
    assert s.ask("b").status_code == 401 and s.server.client.get("/v1/models").status_code == 401
    assert s.loads == ["a"] and s.server.client.get("/health").status_code == 200
    s.server.client.headers["Authorization"] = "Bearer one"
    assert s.said("b") == "I am b"
    kept = s.server.client.get("/v1/workspace").json()
    assert kept["b"]["caches"] == 1 and set(kept) == {"a", "b"}
    assert s.server.client.delete("/v1/workspace").json()["forgotten"] is True
    assert s.server.client.get("/v1/workspace").json()["b"]["caches"] == 0


def test_models_have_names_of_their_own(tmp_path):
    odd = tmp_path / "a=b"
    odd.mkdir()
    given = ["reference", "x/Some-Model", "chat=/m/chat", "odd=/m/x=1", str(odd)]
    assert list(named(given).items())[1:] == [
        ("Some-Model", "x/Some-Model"),
        ("chat", "/m/chat"),
        ("odd", "/m/x=1"),
        ("a=b", str(odd)),
    ]
    for wrong in (["x/m", "y/m"], ["a="], ["=x"], ["a=x", "a=y"]):
        with pytest.raises(ServeError, match="names of their own"):
            named(wrong)
