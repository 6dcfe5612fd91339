"""Inputs of `generate`: what plain `generate` refuses is refused, and what it answers has the same ids."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from batch_rows import KINDS, small_model
from transformers import AutoConfig, AutoModelForSeq2SeqLM, DynamicCache

import retrieve_spec as rs

NEW = 6
HELD = 4
"""Tokens of a cache that is given."""
Variations = dict[str, dict[str, Any]]


def ids_of(length: int, rows: int) -> torch.Tensor:
    return torch.tensor([[3 + (i * 37 + 11 * row) % 190 for i in range(length)] for row in range(1, rows + 1)])


def ones(length: int, rows: int) -> torch.Tensor:
    return torch.ones(rows, length, dtype=torch.long)


def padded(length: int, rows: int) -> torch.Tensor:
    mask = ones(length, rows)
    mask[0, :2] = 0
    return mask


def places(length: int, rows: int) -> torch.Tensor:
    return torch.arange(length)[None].expand(rows, length).contiguous()


def masks_and_positions(length: int, rows: int) -> Variations:
    """Of other lengths and row counts, alone and beside one another, with padding and holes."""
    found: Variations = {}
    for more in (-5, -1, 1, 4, 40):
        mask, positions = {"attention_mask": ones(length + more, rows)}, {"position_ids": places(length + more, rows)}
        found |= {
            f"mask {more:+}": mask, f"positions {more:+}": positions, f"mask and positions {more:+}": mask | positions,
            f"padding {more:+}": {"attention_mask": padded(length + more, rows)},
            f"padding, positions {more:+}": positions | {"attention_mask": padded(length, rows)},
        }  # fmt: skip
    for other in {1, 2, 4} - {rows}:
        found |= {
            f"mask of {other} rows": {"attention_mask": ones(length, other)},
            f"padding of {other} rows": {"attention_mask": padded(length, other)},
            f"positions of {other} rows": {"position_ids": places(length, other)},
        }
    hole, end, given = ones(length, rows), ones(length, rows), places(length, rows)
    hole[0, length // 2], end[:, -2:] = 0, 0
    masks = {"hole": hole, "padding behind": end, "nothing": 0 * hole, "of one": ones(1, rows), "none": ones(0, rows)}
    others = {"of one": given[:, :1], "less": given - 3, "more": given + 3, "steps": 2 * given, "same": 0 * given + 4,
              "back": given.flip(1), "far": given + 5000}  # fmt: skip
    found |= {f"mask: {name}": {"attention_mask": mask} for name, mask in masks.items()}
    return found | {f"positions: {name}": {"position_ids": positions} for name, positions in others.items()}


def caches(model: Any, length: int, rows: int) -> Variations:
    """Caches that do not fit, with the whole text or the new tokens, and masks and positions that do not fit them."""

    def holding(tokens: int, many: int, layers: slice, *index: Any) -> Callable[[], DynamicCache]:
        """Makes a cache of which some layers keep only what an index says."""

        def made() -> DynamicCache:
            cache = DynamicCache(config=model.config)
            with torch.no_grad():
                model(ids_of(tokens, many), past_key_values=cache)
            for layer in cache.layers[layers]:
                layer.keys, layer.values = layer.keys[index], layer.values[index]
            return cache

        return made

    def with_one_layer() -> DynamicCache:
        cache = fits()
        del cache.layers[1:]
        return cache

    new, whole = {"input_ids": ids_of(length, rows)[:, HELD:]}, slice(None)
    fits, shorter = holding(HELD, rows, slice(0)), (..., slice(1, None), whole)
    wrong = {
        "that fits": fits, "of more rows": holding(HELD, rows + 1, slice(0)), "of fewer layers": with_one_layer,
        "with a shorter first layer": holding(HELD, rows, slice(1), *shorter),
        "with a shorter last layer": holding(HELD, rows, slice(1, None), *shorter),
        "too narrow": holding(HELD, rows, whole, ..., slice(2, None)),
        "of fewer heads": holding(HELD, rows, whole, whole, slice(1)),
        "of all": holding(length, rows, slice(0)), "of more": holding(length + 3, rows, slice(0)),
        "as a string": lambda: "no",
    }  # fmt: skip
    given = {"past_key_values": fits}
    found: Variations = {"cache, new tokens without a mask": {**new, **given}}
    for name, cache in wrong.items():
        found[f"cache {name}"] = {"past_key_values": cache}
        found[f"cache {name}, new tokens"] = {**new, "past_key_values": cache, "attention_mask": ones(length, rows)}
    for more in (-1, 1, HELD):
        mask = {**given, "attention_mask": ones(length + more, rows)}
        found |= {f"cache, mask {more:+}": mask, f"cache, new tokens, mask {more:+}": {**new, **mask}}
    for first in (0, 1, HELD, HELD + 1):
        behind = {**given, "position_ids": places(length, rows)[:, first:]}
        found[f"cache, positions from {first}"] = behind
        found[f"cache, new tokens, positions from {first}"] = {**behind, **new, "attention_mask": ones(length, rows)}
    return found


def answer(model: Any, arguments: dict[str, Any], **options: Any) -> torch.Tensor | Exception:
    given = {name: value() if callable(value) else value for name, value in arguments.items() if value is not None}
    try:
        return model.generate(**given, max_new_tokens=NEW, **options)
    except Exception as error:
        return error


def difference(plain: Any, ours: Any, variations: Variations, **options: Any) -> list[str]:
    """What an accelerated model makes otherwise of calls than the same model as it was."""
    found = []
    for name, arguments in variations.items():
        wanted, got = (answer(model, arguments, **options) for model in (plain, ours))
        if isinstance(wanted, Exception) or isinstance(got, Exception):
            if not (isinstance(wanted, Exception) and isinstance(got, Exception)):
                found.append(f"{name}: {wanted!r:.80} and {got!r:.80}")
        elif wanted.shape != got.shape or not (options["do_sample"] or torch.equal(wanted, got)):
            found.append(f"{name}: {wanted[:, -NEW:].tolist()} and {got[:, -NEW:].tolist()}")
    return found


@functools.cache
def pair(kind: int, recorded_pass: Any) -> tuple[Any, Any]:
    """A model as it was and accelerated; calls leave both as they are."""
    name, settings = KINDS[kind]
    plain = small_model(name, **settings)
    return plain, rs.accelerate(copy.deepcopy(plain), recorded_pass=recorded_pass, nodes=8)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("rows", "length"), [(1, 10), (3, 40)])
@pytest.mark.parametrize(("kind", "recorded_pass"), [(0, "always"), (0, "off"), (1, "always"), (2, "off")])
def test_what_plain_generate_refuses_is_refused(kind: int, recorded_pass: Any, rows: int, length: int) -> None:
    plain, ours = pair(kind, recorded_pass)

    given: Variations = {"nothing else": {}, **masks_and_positions(length, rows), **caches(plain, length, rows)}
    variations = {name: {"input_ids": ids_of(length, rows), **more} for name, more in given.items()}
    assert difference(plain, ours, variations, do_sample=False) == []
    if kind == 0 and length == 10:
        assert difference(plain, ours, variations, do_sample=True) == []


@pytest.mark.filterwarnings("ignore")
def test_what_plain_generate_refuses_of_an_encoder_and_a_decoder_is_refused() -> None:
    config = AutoConfig.for_model(
        "bart", vocab_size=199, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=128,
        forced_eos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = AutoModelForSeq2SeqLM.from_config(config).eval()
    ours = rs.accelerate(copy.deepcopy(plain), nodes=8)
    length = 10

    ids = {"input_ids": ids_of(length, 1)}
    variations = {"nothing else": ids}
    for name, given in masks_and_positions(length, 1).items():
        decoder = {f"decoder_{key}": value for key, value in given.items()}
        variations[f"encoder, {name}"] = ids | given
        variations[f"decoder, {name}"] = ids | {"decoder_input_ids": ids_of(length, 1)} | decoder
    assert difference(plain, ours, variations, do_sample=False) == []


@pytest.mark.filterwarnings("ignore")
def test_streams_and_requests_refuse_what_generate_refuses() -> None:
    plain, ours = pair(0, "always")
    ids, options = ids_of(40, 1), {"max_new_tokens": NEW, "do_sample": False}
    for name, given in masks_and_positions(40, 1).items():
        wanted = answer(plain, {"input_ids": ids, **given}, do_sample=False)
        try:
            streamed = [t for piece in rs.generate_stream(ours, {"input_ids": ids, **given}, **options)
                        for t in piece.token_ids.tolist()]  # fmt: skip
        except Exception as error:
            streamed = error
        (done,) = rs.generate_many(ours, [{"input_ids": ids, **given}], **options)
        if isinstance(wanted, Exception):
            assert isinstance(streamed, Exception), name
            assert done.error is not None, name
        else:
            assert streamed == done.token_ids.tolist() == wanted[0, 40:].tolist(), name
    with pytest.raises(RuntimeError, match="Expected tensor for argument"):
        list(rs.generate_stream(ours, [5.0, 6.5], **options))


@pytest.mark.parametrize("recorded_pass", ["off", "always"])
def test_positions_of_new_tokens_are_read_in_pieces(recorded_pass: Any) -> None:
    """Behind a cache they may come for the new tokens alone."""
    plain = small_model("llama")
    ours = rs.accelerate(copy.deepcopy(plain), recorded_pass=recorded_pass, nodes=8, prefill_chunk=3)
    ids = ids_of(20, 1)

    def call(model: Any) -> torch.Tensor:
        cache = DynamicCache(config=plain.config)
        with torch.no_grad():
            plain(ids[:, :HELD], past_key_values=cache)
        given = {"attention_mask": ones(20, 1), "position_ids": places(20, 1)[:, HELD:] + 2}
        return model.generate(ids[:, HELD:], past_key_values=cache, max_new_tokens=NEW, do_sample=False, **given)

    assert torch.equal(call(ours), call(plain))
    assert ours.speculation.last.mode == "tree"


def test_drafted_tokens_are_of_the_type_of_the_last_of_the_prompt() -> None:
    """Passes over drafts are given a type for each row, as long as a text grows."""
    plain = small_model("gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.3)
    ours = rs.accelerate(copy.deepcopy(plain), recorded_pass="off", nodes=16)
    ids = 3 + torch.arange(30)[None] % 5
    for last in (0, 1, 2, 9):
        types = torch.full_like(ids, 7).index_fill(1, torch.arange(30 - last, 30), 3)
        given = {"token_type_ids": types, "max_new_tokens": 60, "do_sample": False}
        assert torch.equal(ours.generate(ids, **given), plain.generate(ids, **given)), last
        assert ours.speculation.last.mode == "tree" and ours.speculation.last.tokens_per_pass > 1.5
