"""With the bundled model: every answer is what plain decoding of the same prompt says."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from retrieve_spec.server.schemas import InfillRequest
from retrieve_spec.server.service import Caller

SOURCE = Path(__file__).with_name("typed_sample.txt").read_text("utf-8")
"""A file of this library as it once was: shares of it are measured, which move with a text that is edited."""
CUTS = [3000, 5211, 7402, 9013]


def body(cut, **fields):
    start, end = SOURCE.rfind("\n", 0, cut) + 1, SOURCE.find("\n", cut)
    return {
        "input_prefix": SOURCE[:start],
        "prompt": SOURCE[start:cut],
        "input_suffix": SOURCE[cut : end + 1] + SOURCE[end + 1 :],
        "input_extra": [{"text": SOURCE[:400], "filename": "x.py"}],
        "n_predict": 40,
        **fields,
    }


def plain_text(reference, ids, max_tokens, begun=""):
    """What plain decoding says; behind what was begun, which any tokens may say that are not counted then."""
    service, plain, tokenizer = reference
    pieces = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])

    def agree(input_ids, scores):
        rest = begun[len(tokenizer.decode(input_ids[0, len(ids) :])) :]
        if not rest:
            return scores
        agreeing = [piece != "" and (piece.startswith(rest) or rest.startswith(piece)) for piece in pieces]
        return scores.masked_fill(~torch.tensor(agreeing), -torch.inf)

    with torch.no_grad():
        out = plain.generate(
            torch.tensor([ids]),
            max_new_tokens=max_tokens + len(begun),
            do_sample=False,
            eos_token_id=sorted(service.end_ids),
            logits_processor=[agree],
        )
    new = [i for i in out[0, len(ids) :].tolist() if i not in service.end_ids]
    first = sum(0 < len(tokenizer.decode(new[:count])) <= len(begun) for count in range(1, len(new) + 1))
    text = tokenizer.decode(new[: first + max_tokens])
    assert text.startswith(begun)
    return text[len(begun) :]


@pytest.mark.parametrize("cut", CUTS)
def test_infill_says_what_plain_decoding_says(reference, reference_live, cut):
    service = reference[0]
    task = service.infill(InfillRequest.model_validate(body(cut)), Caller()).task
    expected = plain_text(reference, task.prompt_ids, 40, task.rules.begun)
    on = reference_live.post("/infill", body(cut)).json()
    again = reference_live.post("/infill", body(cut)).json()
    off = reference_live.post("/infill", body(cut, speculative=False)).json()
    fresh = reference_live.post("/infill", body(cut, cache_prompt=False)).json()
    assert on["content"] == again["content"] == off["content"] == fresh["content"] == expected
    assert on["timings"]["draft_n"] > 0
    assert on["timings"]["passes"] < off["timings"]["passes"]
    assert off["timings"]["draft_n"] == 0
    assert again["timings"]["prompt_n"] == 1


def test_whoever_types_beside_others_is_told_what_plain_decoding_says(reference, reference_live):
    def type_at(cut):
        asked = body(cut, n_predict=12, cache_prompt=False)
        return reference_live.post("/infill", asked, headers={"X-Client-Id": f"at {cut}"}).json()["content"]

    expected = []
    for cut in CUTS[:3]:
        task = reference[0].infill(InfillRequest.model_validate(body(cut, n_predict=12)), Caller()).task
        expected.append(plain_text(reference, task.prompt_ids, 12, task.rules.begun))
    with ThreadPoolExecutor() as typists:
        assert list(typists.map(type_at, CUTS[:3])) == expected


def test_who_types_on_is_told_what_plain_decoding_says(reference, reference_live):
    """In the middle of a word, behind it, and after a word of another beginning: always what plain decoding says."""
    service, cut = reference[0], CUTS[1]
    suggested = reference_live.post("/infill", body(cut, n_predict=32)).json()
    for typed in (*(suggested["content"][:length] for length in (1, 2, 5, 9)), "zeta", "(x"):
        on = {**body(cut, n_predict=32), "prompt": body(cut)["prompt"] + typed}
        task = service.infill(InfillRequest.model_validate(on), Caller()).task
        answer = reference_live.post("/infill", on).json()
        assert answer["content"] == plain_text(reference, task.prompt_ids, 32, task.rules.begun)
        assert answer["timings"]["prompt_n"] < 24 < len(task.prompt_ids)


def test_tokens_that_say_what_was_begun_are_not_counted(reference_live):
    typed = {**body(CUTS[0]), "prompt": "    def begun_with_strange_letters_zq"}
    whole = reference_live.post("/infill", typed).json()
    for count in (1, 3):
        answer = reference_live.post("/infill", {**typed, "n_predict": count}).json()
        assert whole["content"].startswith(answer["content"]) and answer["content"]
        assert (answer["stop_type"], answer["tokens_predicted"]) == ("limit", count)


def test_completions_and_chat_say_what_plain_decoding_says(reference, reference_live):
    codec = reference[0].codec
    prompt = SOURCE[:1500]
    answer = reference_live.post("/v1/completions", {"prompt": prompt, "max_tokens": 32}).json()
    assert answer["choices"][0]["text"] == plain_text(reference, codec.encode_prompt(prompt), 32)
    messages = [{"role": "user", "content": "Repeat: " + SOURCE[:600]}]
    request = {"messages": messages, "max_tokens": 32, "prediction": {"type": "content", "content": SOURCE[:600]}}
    answer = reference_live.post("/v1/chat/completions", request).json()
    ids = codec.encode("user\nRepeat: " + SOURCE[:600])
    ids = [codec.token_id("<|im_start|>"), *ids, codec.token_id("<|im_end|>"), *codec.encode("\n")]
    ids += [codec.token_id("<|im_start|>"), *codec.encode("assistant\n")]
    assert answer["choices"][0]["message"]["content"] == plain_text(reference, ids, 32)


@pytest.mark.parametrize("samplers", [["top_k", "top_p", "infill"], ["top_k", "top_p", "temperature"]])
def test_sampling_is_the_same_with_and_without_drafts(reference_live, samplers):
    fields = {"samplers": samplers, "top_k": 40, "top_p": 0.9, "temperature": 0.8, "seed": 7}
    on = reference_live.post("/infill", body(CUTS[0], **fields)).json()
    off = reference_live.post("/infill", body(CUTS[0], speculative=False, **fields)).json()
    assert on["content"] == off["content"]
