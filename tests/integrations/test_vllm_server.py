"""The proposer behind vLLM's OpenAI server, asked by the `openai` client; `make test-vllm` runs these where vLLM is."""

import asyncio
import contextlib
import json
import os
import re
import socket
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from processes import running
from recorded_texts import token_prompts
from tokenizers import Tokenizer

import retrieve_spec

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")
openai = pytest.importorskip("openai", reason="vLLM brings it")

PACKAGE = Path(retrieve_spec.__file__).parent
SPEC = {
    "method": "custom_class",
    "model": "retrieve_spec.integrations.vllm.Proposer",
    "num_speculative_tokens": 8,
}
STARTS = 480
"""Seconds in which a server starts, kernels compiled."""


class Server:
    """vLLM's server over the bundled model in a process, whose engine is another, with a cache for few requests."""

    def __init__(self, log, *options):
        self.log = log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(PACKAGE / "reference"), "--served-model-name", "reference", "--dtype", "float32"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager", "--max-model-len", "512"]
        command += ["--max-num-seqs", "16", "--max-num-batched-tokens", "128", "--kv-cache-memory-bytes", str(4 << 20)]
        environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING"}
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        with log.open("w") as out:
            self.running = contextlib.ExitStack()
            self.process = self.running.enter_context(
                running([*command, *options], stdout=out, stderr=out, env=environment)
            )

    def wait(self):
        for _ in range(STARTS):
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            try:
                self.get("health")
                return self
            except OSError:
                time.sleep(1)
        raise AssertionError(self.log.read_text()[-2000:])

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{path}", timeout=30) as answer:
            return answer.read().decode()

    def counted(self, name):
        return sum(float(value) for value in re.findall(rf"^vllm:{name}_total{{.*}} (\S+)$", self.get("metrics"), re.M))

    def client(self):
        return openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=STARTS
        )

    def stop(self):
        with self.running:
            self.process.terminate()
            self.process.wait()


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """One without drafts, and ours."""
    folder = tmp_path_factory.mktemp("servers")
    drafts = ["--speculative-config", json.dumps(SPEC)]
    drafts += ["--additional-config", json.dumps({"retrieve_spec": {"session": True, "state": str(folder / "state")}})]
    made = [Server(folder / "plain.log"), Server(folder / "ours.log", *drafts)]
    try:
        yield [server.wait() for server in made]
    finally:
        for server in made:
            server.stop()


@pytest.fixture(scope="module")
def prompts():
    tokenizer = Tokenizer.from_file(str(PACKAGE / "reference" / "tokenizer.json"))
    return token_prompts(lambda text: tokenizer.encode(text).ids)


def answers(server, prompts, at_once, **given):
    """Token ids of what each prompt is answered with, `at_once` at a time; one list for each of its choices."""

    async def all_of_them():
        free = asyncio.Semaphore(at_once)
        async with server.client() as client:

            async def one(i, prompt):
                asked = {"temperature": 0, "max_tokens": (1, 2, 30, 140)[i % 4], **given}
                extra = {"return_token_ids": True, "ignore_eos": i % 3 == 0, **asked.pop("extra_body", {})}
                async with free:
                    made = await client.completions.create(model="reference", prompt=prompt, extra_body=extra, **asked)
                return [choice.token_ids for choice in made.choices]

            return await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts)))

    return asyncio.run(all_of_them())


@pytest.fixture(scope="module")
def wanted(servers, prompts):
    return answers(servers[0], prompts, 16)


@pytest.mark.parametrize("at_once", [1, 4, 16])
def test_greedy_text_is_that_without_drafts(servers, prompts, wanted, at_once):
    ours = servers[1]
    accepted = ours.counted("spec_decode_num_accepted_tokens")
    assert answers(ours, prompts, at_once) == wanted
    assert ours.counted("spec_decode_num_accepted_tokens") > accepted
    assert at_once < 16 or ours.counted("num_preemptions") > 0
    assert "drafting failed" not in ours.log.read_text()


def test_requests_that_are_given_up_and_samples_beside_them(servers, prompts, wanted):
    ours = servers[1]

    async def given_up(prompt):
        async with ours.client() as client:
            stream = await client.completions.create(
                model="reference", prompt=prompt, max_tokens=200, temperature=0, stream=True
            )
            async for _ in stream:
                break
            await stream.close()

    async def many():
        await asyncio.gather(*map(given_up, prompts[2:6]))

    for _ in range(2):
        asyncio.run(many())
        samples = answers(ours, prompts[3:5], 2, temperature=0.7, n=4, max_tokens=20, seed=None)
        assert [len(choices) for choices in samples] == [4, 4] and all(samples[0])
        assert answers(ours, prompts[:8], 4) == wanted[:8]
    assert "drafting failed" not in ours.log.read_text()


def test_wishes_of_requests(servers, prompts, wanted):
    ours = servers[1]
    drafted = ours.counted("spec_decode_num_draft_tokens")
    off = {"vllm_xargs": {"retrieve_spec_draft": 0}}
    assert answers(ours, prompts[:8], 1, extra_body=off) == wanted[:8]
    assert ours.counted("spec_decode_num_draft_tokens") == drafted
    expected = {"vllm_xargs": {"retrieve_spec_prediction": "def f(x):\n    return x\n", "retrieve_spec_keep": "no"}}
    assert answers(ours, prompts[:8], 4, extra_body=expected) == wanted[:8]
    assert "drafting failed" not in ours.log.read_text()
