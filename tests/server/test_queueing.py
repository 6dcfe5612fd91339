import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from scripted import Collector, ScriptedBackend
from waiting import wait_for

from retrieve_spec.server.backend import DraftHints
from retrieve_spec.server.guard import Refusal
from retrieve_spec.server.jobs import Task
from retrieve_spec.server.queueing import RequestQueue
from retrieve_spec.server.sampling import Sampling
from retrieve_spec.server.text import StopRules

RULES = StopRules(max_tokens=8, end_ids=frozenset({0}))


def count_up(prompt):
    return [prompt[-1] + i for i in range(1, 200)]


@pytest.fixture
def backend():
    return ScriptedBackend(count_up)


@pytest.fixture
def held(backend):
    """The same; its passes wait to be let go."""
    backend.gate = threading.Semaphore(0)
    return backend


@pytest.fixture
def engine(backend, codec):
    engine = RequestQueue(backend, codec, slots=2, max_queue=3, prefill_chunk=16)
    engine.start()
    yield engine
    backend.gate.release(10_000)
    engine.close()


def ask(engine, prompt, **fields):
    sink = Collector()
    sink.ticket = engine.submit(Task(tuple(prompt), fields.pop("rules", RULES), **fields), sink)
    return sink


def drain(engine):
    while engine.go_on():
        pass


def test_last_text_and_the_completion_come_in_one_call(engine):
    asked = ask(engine, [500], rules=StopRules(max_tokens=4))
    assert asked.result().token_ids == [501, 502, 503, 504]
    assert asked.calls == [1, 2]


def test_end_inside_a_run_costs_no_further_pass(engine, backend):
    backend.script = lambda prompt: [500, 501, 0, 502, 503, 504]
    done = ask(engine, [600]).result()
    assert done.token_ids == [500, 501]
    assert done.stop_type == "eos"
    assert backend.passes == 2


def test_what_a_cache_holds_is_not_read_again(engine):
    """Two documents in turn; what was decoded counts as read: accepting a completion continues its cache."""
    one, two = list(range(1000, 1060)), list(range(3000, 3050))
    said = ask(engine, one).result().token_ids
    for prompt, cached in (
        (one, 59), ([*one[:50], 7, 8], 50), (two, 0), ([*two, 5], 50), ([*one[:50], 7, 8, 9], 52), ([*two, 5, 6], 51)
    ):  # fmt: skip
        assert ask(engine, prompt).result().cached_tokens >= cached
    accepted = [*two, *ask(engine, two).result().token_ids]
    assert ask(engine, [*accepted, 9]).result().cached_tokens == len(accepted) - 1
    assert ask(engine, [*accepted, 9], reuse=False).result().cached_tokens == 0
    assert ask(engine, [*accepted, 9], scope="another").result().cached_tokens == 0
    assert said == list(range(1060, 1068))


def test_what_was_said_behind_a_prompt_is_expected_there_again(engine, backend, codec):
    said = ask(engine, [600, 601]).result().token_ids
    ask(engine, [600, 601, *said[:3]]).result()
    assert backend.hints[-1].prediction == tuple(said[3:-1])  # the last one was never read
    ask(engine, [600, 601, *said[:3]], rules=StopRules(8, begun="something else")).result()
    assert backend.hints[-1].prediction == ()
    own = DraftHints(prediction=(7,))
    ask(engine, [600, 601], hints=lambda: own).result()
    assert backend.hints[-1].prediction == (7,)
    ask(engine, [600, 601, *said[:2]], scope="another").result()
    assert backend.hints[-1].prediction == ()


def test_another_document_of_the_same_client_is_not_replaced(engine, held):
    a = ask(engine, [500], client="me", document="import os\nprint(os")
    wait_for(lambda: engine.begun)
    b = ask(engine, [510], client="me", document="class A:\n    x")
    c = ask(engine, [520], client="me", document="class A:\n    xy")
    assert b.result().outcome == "superseded"
    held.gate.release(1000)
    assert a.result().outcome == c.result().outcome == "done"


@pytest.mark.parametrize(("prompt", "passes", "kept"), [([500], 2, 0), (range(1000, 1400), 1, 16)])
def test_disconnect_costs_at_most_one_pass(engine, held, prompt, passes, kept):
    """And what was read till then is kept."""
    sink = ask(engine, prompt, rules=StopRules(max_tokens=100))
    held.gate.release(passes)
    wait_for(lambda: held.passes == passes and (passes == 1 or len(sink.events) == 2))
    sink.ticket()
    held.gate.release(100)
    wait_for(lambda: not engine.begun)
    assert held.passes <= passes + 1
    assert ask(engine, [*prompt, 7]).result().cached_tokens >= kept


def test_identical_tasks_are_decoded_once(engine, held):
    sinks = [ask(engine, [500])]
    held.gate.release(2)
    wait_for(lambda: len(sinks[0].events) == 2)
    sinks += [ask(engine, [500]), ask(engine, [500])]
    sinks[0].ticket()
    held.gate.release(100)
    for sink in sinks[1:]:
        assert sink.result().token_ids == list(range(501, 509))
        assert sink.text == sink.result().text
    assert len(held.prompts) == 1


def test_one_of_two_clients_that_ask_the_same_types_on(engine, held):
    one = ask(engine, [500], client="one")
    two = ask(engine, [500], client="two")
    wait_for(lambda: engine.begun)
    newer = ask(engine, [510], client="one")
    assert one.result().outcome == "superseded"
    held.gate.release(100)
    assert two.result().outcome == newer.result().outcome == "done"


def test_a_request_that_was_overtaken_is_superseded_unless_it_asks_the_same(engine, held):
    arrivals = ((500, 2.0), (510, 1.0), (500, 0.5), (500, 3.0))
    asked = [ask(engine, [prompt], client="me", arrived=arrived) for prompt, arrived in arrivals]
    assert asked.pop(1).result().outcome == "superseded"
    held.gate.release(100)
    assert [sink.result().outcome for sink in asked] == ["done"] * 3
    assert len(held.prompts) == 1


@pytest.mark.parametrize(("typing", "together"), [(True, 16), (False, 4)])
def test_tasks_of_one_kind_share_passes(backend, codec, typing, together):
    queue = RequestQueue(backend, codec, max_begun=4)
    sinks = [ask(queue, [500 + 100 * i], client=str(i), typing=typing) for i in range(18)]
    drain(queue)
    for i, sink in enumerate(sinks):
        assert sink.result().token_ids == list(range(501 + 100 * i, 509 + 100 * i))
    assert max(backend.together) == together


def test_who_types_waits_for_no_chat_however_many_there_are(backend, codec):
    queue = RequestQueue(backend, codec, max_begun=4)
    chats = [ask(queue, [500 + 100 * i], rules=StopRules(100)) for i in range(6)]
    queue.go_on()
    typed = ask(queue, [50], typing=True)
    while not typed.done.is_set():
        queue.go_on()
    assert typed.result().token_ids == list(range(51, 59)) and len(backend.prompts) == 5
    assert not any(chat.done.is_set() for chat in chats)


def test_full_queue_refuses_but_drops_stale_keystrokes_first(engine, held):
    ask(engine, [500])
    wait_for(lambda: engine.begun)
    old = ask(engine, [510], client="a", document="import os\nos")
    other = ask(engine, [520], client="b", document="import re\nre")
    ahead = ask(engine, [530], warm=True)
    ask(engine, [540])
    assert ahead.result().outcome == "superseded"
    with pytest.raises(Refusal, match="Try again"):
        ask(engine, [550])  # nobody's keystroke goes for somebody else's
    with pytest.raises(Refusal, match="Try again"):
        ask(engine, [555], client="c", document="import io\nio")
    new = ask(engine, [560], client="a", document="class A:\n    x")
    assert old.result().outcome == "superseded"
    held.gate.release(1000)
    assert other.result().outcome == new.result().outcome == "done"


def test_no_user_fills_the_queue(backend, codec):
    engine = RequestQueue(backend, codec, max_queue=4, share=2)
    ask(engine, [500], scope="a"), ask(engine, [501], scope="a")
    with pytest.raises(Refusal, match="fewer than 2"):
        ask(engine, [510], scope="a")
    ask(engine, [520], scope="b")


def test_who_has_just_pressed_a_key_comes_first_but_after_who_has_paused(backend, codec):
    now = [0.0]
    engine = RequestQueue(backend, codec, cache_bytes=1, clock=lambda: now[0])
    for prompt, pressed in ((500, 0.0), (600, 0.5), (700, 10.0), (800, 11.0)):
        now[0] = pressed
        ask(engine, [prompt], typing=True)
        if prompt in (600, 800):
            now[0] += 1.0
            drain(engine)
    assert backend.prompts == [(600,), (500,), (700,), (800,)]


@pytest.mark.parametrize(("prompt", "passes"), [([500], 2), (range(1000, 1400), 1)])
def test_a_deadline_ends_with_what_there_is(engine, backend, prompt, passes):
    backend.gate = threading.Semaphore(passes - 1)
    sink = ask(engine, prompt, deadline_s=0.3, rules=StopRules(max_tokens=100))
    time.sleep(0.4)
    backend.gate.release(100)
    done = sink.result()
    assert (done.deadline_hit, done.outcome, bool(done.text)) == (True, "done", passes > 1)
    assert backend.passes == passes


def test_warming_reads_the_prompt_and_gives_way(engine, backend):
    done = ask(engine, range(1000, 1050), warm=True).result()
    assert (done.outcome, done.text) == ("done", "")
    assert ask(engine, range(1000, 1050)).result().cached_tokens == 49
    backend.gate = threading.Semaphore(0)
    warm = ask(engine, range(3000, 3400), warm=True)
    backend.gate.release(1)
    wait_for(lambda: engine.begun)
    real = ask(engine, [500])
    backend.gate.release(100)
    assert real.result().outcome == "done"
    assert warm.result().outcome == "superseded"


def test_what_waits_while_its_user_forgets_is_not_kept_either(engine, held):
    ask(engine, [600], typing=True)
    wait_for(lambda: engine.begun)
    waiting = ask(engine, [500], scope="me", hints=lambda: DraftHints(session="a new one"))
    with ThreadPoolExecutor() as threads:
        forgotten = threads.submit(engine.forget, "me")
        wait_for(lambda: engine._chores)
        held.gate.release(100)
        forgotten.result()
    assert waiting.result().outcome == "done"
    assert engine.caches("me") == 0
    assert held.hints[-1].session is None


def test_whoever_is_replaced_by_a_request_that_finds_the_queue_full_is_told(engine, held):
    ask(engine, [500], typing=True)
    wait_for(lambda: engine.begun)
    mine, _ = ask(engine, [510], client="me"), ask(engine, [510], client="you")
    ask(engine, [520]), ask(engine, [530])
    with pytest.raises(Refusal, match="503"):
        ask(engine, [540], client="me")
    assert mine.result().outcome == "superseded"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whoever_waits_for_a_thread_that_ends_is_told_and_nobody_is_let_in(engine, held):
    def end():
        raise KeyboardInterrupt

    under_way, waiting = ask(engine, [500], typing=True), ask(engine, [600])
    wait_for(lambda: engine.begun)
    engine.run_when_idle(end)
    held.gate.release(100)
    assert under_way.result().outcome == waiting.result().outcome == "failed"
    with pytest.raises(Refusal, match="ending"):
        ask(engine, [700])


def test_a_prompt_that_another_is_reading_is_read_once(engine, held):
    sinks = [ask(engine, range(1000, 1100), sampling=Sampling(temperature=1.0, seed=seed)) for seed in range(3)]
    held.gate.release(1000)
    assert [sink.result().cached_tokens for sink in sinks] == [0, 99, 99]
    assert sum(held.prefilled) < 100


def test_idle_moments_are_used_until_a_request_comes(backend, codec):
    idle, failed = [], threading.Event()

    def on_idle():
        if len(idle) == 3:
            failed.set()
            raise ValueError("a pass failed")
        idle.append(backend.passes)
        wait_for(lambda: not engine.is_idle())

    with closing(RequestQueue(backend, codec)) as engine:
        engine.on_idle = on_idle
        engine.start()
        wait_for(lambda: len(idle) == 1)
        assert ask(engine, [600]).result().token_ids == list(range(601, 609))
        wait_for(lambda: len(idle) == 2)
        assert engine.run_when_idle(lambda: 5).result() == 5
        wait_for(lambda: len(idle) == 3)
        assert ask(engine, [700]).result().token_ids == list(range(701, 709))
        wait_for(failed.is_set)
        assert ask(engine, [800]).result().token_ids == list(range(801, 809))
    assert idle[0] == 0 < idle[1] == idle[2]
