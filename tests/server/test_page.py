"""The page for browsers: what it shows, with a key and without, and while the model is being loaded."""

import re
import shutil
import subprocess
import threading

import pytest
from starlette.testclient import TestClient

from retrieve_spec.config import EDITORS, ServeConfig
from retrieve_spec.server.app import create_app
from retrieve_spec.server.guard import Metrics
from retrieve_spec.server.models import Model, Models

CHROMIUM = shutil.which("chromium")
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


def shown(url, profile):
    """The text of a page after its scripts have run."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
               "--virtual-time-budget=3000", "--dump-dom", url]  # fmt: skip
    dom = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stdout
    return re.sub(r"(<script.*?</script>|<style.*?</style>|<[^>]*>|\s)+", " ", dom, flags=re.DOTALL)


def test_the_page_needs_nothing_from_elsewhere(live, say):
    server = live(say("said"), keys=(b"one",))
    answer = server.client.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "|".join(EDITORS) in answer.text
    assert not re.search(r"(?:src|href)=|https?://", answer.text)
    assert server.client.head("/").status_code == 200


@in_a_browser
def test_a_browser_shows_models_figures_and_addresses(live, say, tmp_path):
    server = live(say("said"), config=ServeConfig(path_prefix="/llm"))
    server.post("/v1/completions", {"prompt": "x", "max_tokens": 9})
    text = shown(f"{server.url}/llm", tmp_path)
    assert "Serves tiny." in text and "tiny loaded, 4,096 tokens, fills in the middle" in text
    assert re.search(r"Tokens generated [1-9]", text) and re.search(r"Tokens per pass \d\.\d\d", text)
    assert f"{server.url}/llm/v1" in text


@in_a_browser
def test_a_browser_is_asked_for_the_key(live, say, tmp_path):
    assert "A key is required." in shown(live(say("said"), keys=(b"one",)).url, tmp_path)


def test_the_page_is_there_while_the_model_is_loaded():
    models = Models({"tiny": Model(threading.Event().wait)}, ServeConfig(), Metrics())
    with TestClient(create_app(models), base_url="http://localhost") as client:
        assert client.get("/").status_code == 200 and client.get("/v1/models").status_code == 503
