"""Next edits: the model is asked for the whole new text of a file, and expected to say most of the old text again.

The new text is asked for in a fence, which is opened for the model: its answer begins with the text and ends where the
fence is closed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from retrieve_spec.server.guard import Refusal
from retrieve_spec.server.schemas import EditRequest, Prediction
from retrieve_spec.server.service import Caller, Prepared, Service

_BACKTICKS = re.compile("`+")


@dataclass(frozen=True, slots=True)
class Edit:
    """What the model is asked, and what it is expected to answer.

    Attributes
    ----------
    question
        What the user says.
    expected
        The text that the client expects, the old one where it does not say.
    fence
        Backticks in front of the new text and behind it, more than stand together in what was given.
    closed
        Strings that end the answer. A text without a newline at its end is answered without one.
    """

    question: str
    expected: str
    fence: str
    closed: tuple[str, ...]

    @classmethod
    def of(cls, request: EditRequest) -> Edit:
        """What a request asks for.

        Raises
        ------
        Refusal
            400: there is nothing to change, or nothing is said of what to change.
        """
        text, instruction, path = request.input, request.instruction.strip(), request.path or ""
        if not text:
            raise Refusal(400, '"input" is empty: there is nothing to change; ask /v1/completions for a new text')
        if not instruction:
            raise Refusal(400, '"instruction" is empty: say what is to be changed')
        expected = request.prediction.as_text() if request.prediction else text
        runs = _BACKTICKS.findall("\n".join((text, instruction, path)))
        fence = "`" * max(3, 1 + max(map(len, runs), default=0))
        ended = text.endswith("\n")
        question = (
            f"{instruction}\n\n{path}\n{fence}\n{text}" + ("" if ended else "\n") + f"{fence}\n\n"
            f"Answer with the whole new text between two lines of {len(fence)} backticks, and nothing else."
        )
        return cls(question, expected, fence, (fence,) if ended else (f"\n{fence}", fence))

    def prepare(self, service: Service, request: EditRequest, caller: Caller, wanted: int) -> Prepared:
        """The task; with ``wanted`` below 0 there must be room for the whole text.

        Raises
        ------
        Refusal
            400: the model cannot read the text, or not say as much again.
        """
        given = [request.stop] if isinstance(request.stop, str) else request.stop or []
        prediction = Prediction(content=self.expected)
        asked = request.model_copy(update={"prediction": prediction, "stop": [*given, *self.closed]})
        ids, expected = service.prompts.asked(self.question, f"{self.fence}\n"), service.prompts.expected(asked)
        room = service.backend.n_ctx - len(ids)
        if wanted < 0 and len(expected) > room:
            raise Refusal(
                400,
                f"the new text may need {len(expected)} tokens, and {max(0, room)} can follow the prompt of {len(ids)};"
                " send a part of the file, or say with max_tokens how much of the new text is enough",
                "exceed_context",
            )
        return service.raw(ids, asked, caller, wanted, expected)
