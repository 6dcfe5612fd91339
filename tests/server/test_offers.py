"""Connections of Java clients and behind proxies: offers of another protocol, foreign host names, a path in front."""

import socket

import pytest

from retrieve_spec.config import ServeConfig

BODY = b'{"content": "a b"}'
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"


def head(more=b"", path=b"/tokenize"):
    return b"POST %s HTTP/1.1\r\nHost: localhost\r\n%sContent-Length: %d\r\n\r\n" % (path, more, len(BODY))


CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n%sTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (
    OFFER,
    len(BODY),
    BODY,
)


@pytest.mark.parametrize(
    "writes",
    [
        [head(OFFER) + BODY],
        [head(OFFER), BODY],
        [head(OFFER)[:60], head(OFFER)[60:] + BODY[:5], BODY[5:]],
        [head(OFFER) + BODY + head(OFFER) + BODY],
        [head(OFFER), BODY + head() + BODY],
        [CHUNKED],
        [CHUNKED[:-12], CHUNKED[-12:] + head(OFFER), BODY],
        [b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"],
    ],
)
def test_an_offer_of_another_protocol_is_ignored(live, say, writes):
    server = live(say("x"))
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for data in writes:
            connection.sendall(data)
            server.client.get("/health")  # the server has read it
        connection.sendall(head(b"Connection: close, Upgrade\r\nUpgrade: h2c\r\n") + BODY)
        answer = b""
        while data := connection.recv(65536):
            answer += data
    asked = b"".join(writes).count(b"HTTP/1.1\r\n") + 1
    assert answer.count(b"HTTP/1.1 200") == asked == answer.count(b"HTTP/1.1 "), answer
    assert answer.count(b'{"tokens":[') == asked - b"".join(writes).count(b"GET ")


def test_nobody_is_connected_to_elsewhere(live, say):
    with socket.create_connection(("127.0.0.1", live(say("x")).port), timeout=60) as connection:
        connection.sendall(b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 405")


FOREIGN = {"Host": "llm.example.org"}


def test_behind_a_proxy_a_key_is_enough(live, say):
    server = live(say("x"), keys=(b"one",))
    for key, status in (("one", 200), ("two", 401)):
        headers = {**FOREIGN, "Authorization": f"Bearer {key}"}
        assert server.client.get("/v1/models", headers=headers).status_code == status


def test_without_keys_a_name_must_be_allowed(live, say):
    server = live(say("x"), config=ServeConfig(allowed_hosts=("LLM.example.org",)))
    for host, status in (
        ("llm.example.org", 200), ("llm.example.org:8443", 200), ("evil.example.org", 403), ("localhost:1", 200),
        ("[::1]:80", 200), ("127.0.0.1", 200), ("0.0.0.0:8012", 200), ("[::]:80", 200),
    ):  # fmt: skip
        assert server.client.get("/v1/models", headers={"Host": host}).status_code == status, host
    refused = live(say("x")).client.get("/v1/models", headers=FOREIGN)
    assert refused.status_code == 403 and "--allow-host" in refused.json()["error"]["message"]


def test_a_page_of_the_server_itself_may_call(live, say):
    server = live(say("x"))
    for origin, status in ((server.url, 200), ("http://127.0.0.1:1", 403), ("null", 403)):
        asked = server.post("/tokenize", {"content": "a"}, headers={"Origin": origin, "Sec-Fetch-Site": "same-origin"})
        assert asked.status_code == status


def test_a_path_in_front_may_be_there_or_not(live, say):
    server = live(say("said"), config=ServeConfig(path_prefix="/llm/"))
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}
    for path in ("/v1/chat/completions", "/llm/v1/chat/completions", "/v1/messages", "/llm/v1/messages"):
        assert server.post(path, chat).status_code == 200
    for path in ("/llm//v1/chat/completions", "/v1//chat/completions", "/llm/v1/chat/completions/"):
        assert server.post(path, chat).status_code == 200  # of addresses that end with a slash
    assert server.post("/llm/v1/messages", {}).json()["type"] == "error"
    assert server.post("/llmv1/messages", chat).status_code == 404


def test_bodies_of_many_megabytes_are_read(live, say):
    server = live(say("said"))
    server.service.prompts.most_chars = 1 << 30
    server.backend.n_ctx = 1 << 30
    picture = {"type": "image_url", "image_url": {"url": "data:," + "A" * (20 << 20)}}
    said = [{"role": "user", "content": [picture, {"type": "text", "text": "What is it?"}]}]
    answer = server.post("/v1/chat/completions", {"messages": said})
    assert answer.status_code == 200 and answer.headers["x-retrieve-spec-ignored"] == "messages.0 (image_url)"


@pytest.mark.parametrize("stream", [False, True])
def test_a_clients_words_cannot_break_the_header_that_names_what_is_ignored(live, say, stream):
    given = {"input": "a", "include": ["картина\r\nx-other: 1"], "stream": stream}
    answer = live(say("said")).post("/v1/responses", given)
    assert answer.status_code == 200 and "x-other" not in answer.headers
    assert answer.headers["x-retrieve-spec-ignored"].startswith(r"include (\u043a")
