"""Random sequences of calls and changes, drawn by Hypothesis, of one `World`."""

import faulthandler
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from world import World, prompts

SECONDS = 2700
"""After which one sequence is taken to hang: the stacks of all threads are shown and the process ends."""

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=4)
ONE = st.lists(st.integers(1, 40), min_size=1, max_size=1)
NEW = st.sampled_from([1, 2, 7, 20])
SEED = st.integers(0, 999)
OPTIONS = st.fixed_dictionaries(
    {
        "recorded_pass": st.sampled_from(["always", "off"]),
        "session": st.booleans(),
        "prefill_chunk": st.sampled_from([0, 0, 5]),
        "nodes": st.sampled_from([4, 24, "auto"]),
    }
)
TURNS = st.sampled_from(["step"] * 9 + ["close", "abandon", "call", "Ctrl-C"])
WARPERS = st.sampled_from([{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.6, "top_k": 20}])


KEEPS_TEXT = {"recurrent_gemma"}
"""Families whose first pass over a single token goes on behind whatever text their modules saw last, by themselves."""


def machine(family: str, **fixed: Any) -> type[RuleBasedStateMachine]:
    """The machine of one family; `fixed` are options of `accelerate` that are not drawn."""

    least = 2 if family in KEEPS_TEXT else 1

    def asked(lengths: list[int], seed: int, loop: bool) -> dict[str, torch.Tensor]:
        return prompts([max(length, least) for length in lengths], seed, loop)

    class Hammer(RuleBasedStateMachine):
        world: World

        @initialize(options=OPTIONS)
        def begin(self, options: dict[str, Any]) -> None:
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            note(f"{family}: {options | fixed}")
            self.world = World(family, options | fixed)

        def teardown(self) -> None:
            if hasattr(self, "world"):
                self.world.close_all()
            faulthandler.cancel_dump_traceback_later()

        @rule(lengths=LENGTHS, seed=SEED, loop=st.booleans(), new=NEW, own=st.sampled_from(["", "", "nudge", "stop"]))
        def generate(self, lengths: list[int], seed: int, loop: bool, new: int, own: str) -> None:
            self.world.generate(asked(lengths, seed, loop), own if len(lengths) == 1 else "", max_new_tokens=new)

        @rule(lengths=ONE, seed=SEED, loop=st.booleans(), new=NEW, nodes=st.sampled_from([0, 1, 60, None]))
        def generate_into_a_cache(self, lengths: list[int], seed: int, loop: bool, new: int, nodes: int | None) -> None:
            self.world.generate(asked(lengths, seed, loop), cache=True, max_new_tokens=new, nodes=nodes)

        @rule(lengths=LENGTHS, seed=SEED, loop=st.booleans(), new=NEW, warpers=WARPERS, each=st.sampled_from([1, 1, 3]))
        def sample(
            self, lengths: list[int], seed: int, loop: bool, new: int, warpers: dict[str, Any], each: int
        ) -> None:
            options = {"max_new_tokens": new, "do_sample": True, "seed": seed, "num_return_sequences": each}
            self.world.generate(asked(lengths, seed, loop), **options, **warpers)

        @rule(lengths=st.lists(st.integers(1, 12), min_size=6, max_size=12), seed=SEED, loop=st.booleans())
        def generate_many_rows(self, lengths: list[int], seed: int, loop: bool) -> None:
            self.world.generate(asked(lengths, seed, loop), max_new_tokens=6)

        @rule(lengths=ONE, seed=SEED, new=NEW)
        def generate_in_two_threads(self, lengths: list[int], seed: int, new: int) -> None:
            self.world.together(asked(lengths, seed, True), asked(lengths, seed + 1, False), new)

        @rule(
            many=st.lists(st.tuples(st.integers(1, 40), SEED, st.booleans()), min_size=2, max_size=3),
            turns=st.lists(
                st.tuples(st.integers(0, 2), st.sampled_from(["step"] * 9 + ["close", "abandon", "call", "Ctrl-C"]))
            ),
        )
        def interleave_streams(self, many: list[tuple[int, int, bool]], turns: list[tuple[int, str]]) -> None:
            for length, seed, sampled in many:
                self.world.open_stream(asked([length], seed, seed % 2 > 0), 20, seed if sampled else None)
            for number, what in turns:
                if what == "call":
                    self.world.generate(asked([9], number, True), max_new_tokens=7)
                elif what == "Ctrl-C":
                    self.world.interrupt(asked([9 + len(turns)], number, True), 40 * len(turns) + 150 * number, 12)
                elif self.world.streams:
                    act = {"step": self.world.step_stream, "close": self.world.close_stream}
                    act.get(what, self.world.abandon_stream)(number % len(self.world.streams))
            while self.world.streams:
                self.world.step_stream(0)

        @precondition(lambda self: len(self.world.streams) < 3)
        @rule(lengths=ONE, seed=SEED, loop=st.booleans(), new=NEW, sampled=st.booleans())
        def open_stream(self, lengths: list[int], seed: int, loop: bool, new: int, sampled: bool) -> None:
            self.world.open_stream(asked(lengths, seed, loop), new, seed if sampled else None)

        @precondition(lambda self: self.world.streams)
        @rule(number=st.integers(0, 2), steps=st.integers(1, 4))
        def step_stream(self, number: int, steps: int) -> None:
            for _ in range(steps):
                if self.world.streams:
                    self.world.step_stream(number % len(self.world.streams))

        @precondition(lambda self: self.world.streams)
        @rule(number=st.integers(0, 2), closed=st.booleans())
        def end_stream(self, number: int, closed: bool) -> None:
            end = self.world.close_stream if closed else self.world.abandon_stream
            end(number % len(self.world.streams))

        @rule(lengths=ONE, seed=SEED, calls=st.integers(1, 9), where=st.sampled_from(["processor", "criterion"]))
        def fail(self, lengths: list[int], seed: int, calls: int, where: str) -> None:
            kind = KeyboardInterrupt if seed % 2 else ZeroDivisionError
            self.world.fail(asked(lengths, seed, seed % 3 > 0), calls, where, kind, 20)

        @rule(lengths=st.one_of(ONE, ONE, LENGTHS), seed=SEED, lines=st.integers(1, 3000))
        def interrupt(self, lengths: list[int], seed: int, lines: int) -> None:
            self.world.interrupt(asked(lengths, seed, seed % 3 > 0), lines, 20)

        @rule(which=st.integers(0, 99), row=st.integers(0, 198), way=st.sampled_from(["no_grad", "data", "swap"]))
        def edit(self, which: int, row: int, way: str) -> None:
            self.world.edit(which, row, way, -1.5)

        @rule(dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
        def cast(self, dtype: torch.dtype) -> None:
            self.world.cast(dtype)

        @rule(how=st.sampled_from(["add", "add", "set", "disable", "enable", "delete"]), number=st.integers(0, 1))
        def adapt(self, how: str, number: int) -> None:
            self.world.adapt(how, number)

        @rule(options=OPTIONS)
        def accelerate_again(self, options: dict[str, Any]) -> None:
            self.world.accelerate_again(options | fixed)

        @rule()
        def forget(self) -> None:
            self.world.model.speculation.forget()

    Hammer.TestCase.settings = settings(deadline=None)
    return Hammer


def sequences(count: int, steps: int, *, random: bool, shrink: bool = True) -> settings:
    """So many sequences of so many steps: always the same ones, or new ones each time."""
    phases = [Phase.generate] + ([Phase.shrink] if shrink else [])
    return settings(
        max_examples=count,
        stateful_step_count=steps,
        derandomize=not random,
        database=None,
        deadline=None,
        phases=phases,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
