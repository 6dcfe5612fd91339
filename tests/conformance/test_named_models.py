"""Models whose calls or forwards are unlike others': each says what its own `generate` says."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from batch_rows import small_model
from census import Planted, build, prompt
from census_models import picture_prompt
from families import FAMILIES, Family
from families import build as build_family
from scripted_drafter import ScriptedDrafter
from transformers import GenerationMixin, MistralForCausalLM

import retrieve_spec as rs
from retrieve_spec.verify.interface import read_interface
from retrieve_spec.verify.probe import probe

pytestmark = pytest.mark.filterwarnings("ignore")
GREEDY = {"max_new_tokens": 12, "do_sample": False}


def padded(model: Any, length: int = 24, padding: int = 7) -> dict[str, torch.Tensor]:
    ids = torch.cat([torch.zeros(1, padding, dtype=torch.long), prompt(model, length)], dim=1)
    return {"input_ids": ids, "attention_mask": torch.tensor([[0] * padding + [1] * length])}


def drafted(model: Any, inputs: dict[str, Any], *scripts: str, new: int = 12, **options: Any) -> Any:
    """Accelerate a model, and let it decode under drafts of some manners what it decodes by itself; the last report."""
    decoding = {"max_new_tokens": new, "do_sample": False}
    wanted, planted = model.generate(**inputs, **decoding), Planted()
    rs.accelerate(model, drafter=planted, **{"nodes": 12} | options)
    for script in scripts or ("branchy",):
        planted.plant(wanted[0], wanted.shape[1] - new, script)
        assert torch.equal(model.generate(**inputs, **decoding), wanted), script
    return model.speculation.last


CASES = [
    # with padding in front
    *((name, "image", "padded", mode) for name, mode in (
        ("exaone4_5", "tree"), ("paligemma", "tree"), ("git", "chain"),
        ("kosmos-2.5", "tree"), ("qwen2_vl", "tree"), ("qwen3_5", "tree"),  # these two: positions of several axes
    )),
    # behind a picture: token types, states of pictures, layers that hold nothing else, positions of several axes
    *((name, "image", "picture", "tree") for name in ("qwen2_vl", "gemma3", "mllama")),
    # positions that the model derives itself: buckets of distances, positions, the number of cached tokens
    ("t5", "seq2seq", "text", "tree"), ("bart", "causal", "text", "tree"), ("roformer", "causal", "text", "tree"),
    ("qwen4_exp_text", "causal", "padded", "chain"),  # a hybrid whose attention takes no trees
    ("fsmt", "seq2seq", "text", "plain"),  # an encoder that does not say what it embeds
]  # fmt: skip


@pytest.mark.parametrize(("name", "mapping", "kind", "mode"), CASES)
def test_models_say_what_their_own_generate_says(name: str, mapping: str, kind: str, mode: str) -> None:
    """Processors say of every token of a padded row that it is text; no hook stays behind."""
    model = build(name, mapping)
    inputs = {"input_ids": prompt(model, 30)} if kind == "text" else padded(model)
    if name.startswith("qwen") and mapping == "image":
        inputs["mm_token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    last = drafted(model, picture_prompt(model) if kind == "picture" else inputs, "branchy", "wrong", "half", "right")
    assert model.speculation.mode == mode
    assert last.tokens_per_pass > 1.5 or last.mode == "plain"
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("padding", [0, 3, 8])
def test_a_padded_row_in_layers_of_a_kind_of_their_own(padding: int) -> None:
    """Their window slides over the mask of the padding, too: each single step moves it on by one token."""
    model = build("unlimited_ocr", "image")
    last = drafted(model, padded(model, padding=padding), "right", new=40)
    assert (last.tokens_per_pass > 2) == (not padding)
    assert ("slides over the padding" in last.reason) == bool(padding)


@pytest.mark.parametrize(("name", "mode"), [("git", "delegated"), ("exaone4_5", "tree")])
def test_a_batch_of_vision_models_with_text_alone_says_what_plain_generate_says(name: str, mode: str) -> None:
    """Tokens of GIT see padding that their prompt does not: its rows cannot go on as if they had none."""
    model = build(name, "image")
    lengths = (8, 36, 18)
    rows = [[0] * (36 - length) + prompt(model, length, 37 + length)[0].tolist() for length in lengths]
    shown = torch.tensor([[0] * (36 - length) + [1] * length for length in lengths])
    inputs = {"input_ids": torch.tensor(rows), "attention_mask": shown}
    wanted = model.generate(**inputs, **GREEDY)
    rs.accelerate(model)
    assert torch.equal(model.generate(**inputs, **GREEDY), wanted)
    assert model.speculation.last.mode == mode


@pytest.mark.parametrize(("family", "way"), [("mamba2", "rows"), ("mamba", "steps")])
def test_a_pass_that_raises_leaves_mixers_as_they_were(family: str, way: str) -> None:
    known = next(each for each in FAMILIES if each.name == family)
    model = build_family(known, known.attention[0])
    mixer = model.backbone.layers[0].mixer
    ids = prompt(model, 20)
    wanted = model.generate(ids, **GREEDY)
    rs.accelerate(model, drafter=ScriptedDrafter(wanted[0], "branchy", vocab=199), nodes=12)
    assert model.speculation.interface.recurrence.way == way
    passes = []

    def fails(_module: Any, args: Any) -> None:
        passes.append(args[0].shape)
        if len(passes) == 3:
            raise KeyboardInterrupt

    hook = model.backbone.layers[0].mixer.out_proj.register_forward_pre_hook(fails)
    with pytest.raises(KeyboardInterrupt):
        model.generate(ids, **GREEDY)
    hook.remove()
    assert not mixer._forward_pre_hooks and not mixer._forward_hooks and not mixer.in_proj._forward_hooks
    assert "forward" not in vars(mixer)
    assert torch.equal(model.generate(ids, **GREEDY), wanted)


def test_queries_that_are_scaled_anew_every_so_many_tokens() -> None:
    """Llama 4 scales by slot, not by position: nodes of a tree must not lie on both sides of a multiple."""
    plain = next(family for family in FAMILIES if family.name == "llama4_text")
    extra = plain.extra | {"attn_temperature_tuning": True, "floor_scale": 400, "attn_scale": 4.0}
    model = build_family(Family("llama4_text", extra=extra | {"max_position_embeddings": 1024}), "sdpa")
    last = drafted(model, {"inputs": prompt(model, 388)}, new=24, nodes=24)
    assert model.speculation.mode == "tree"
    assert last.tokens_per_pass > 1.2


def test_a_model_with_a_generate_of_its_own_decodes_every_call_itself() -> None:
    model = build("blip", "image")
    pixels = torch.zeros(1, 3, *[model.config.vision_config.image_size] * 2)
    wanted = model.generate(pixel_values=pixels, max_new_tokens=5)
    rs.accelerate(model, nodes=4)
    assert type(model).generate is not GenerationMixin.generate
    assert model.speculation.mode == "delegated"
    assert torch.equal(model.generate(pixel_values=pixels, max_new_tokens=5), wanted)
    assert torch.equal(model.generate(pixels, max_new_tokens=5), wanted)
    assert "generate of its own" in model.speculation.last.reason


class _Wrong(MistralForCausalLM):  # type: ignore[misc]
    """Several tokens at once behind others are read a little wrong, where `wrong` says so."""

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        held = 0 if past_key_values is None else past_key_values.get_seq_length()
        out = super().forward(input_ids, attention_mask, position_ids, past_key_values, **kwargs)
        beyond = held > (self.config.sliding_window or 1 << 30)
        padded = held > 20 and position_ids is not None and int(position_ids[0, 0]) < held
        tree = held > 20 and attention_mask is not None and attention_mask.ndim == 4
        if input_ids.shape[1] > 1 and self.wrong(held, input_ids.shape[1], beyond, padded, tree):
            out.logits[..., 5] += out.logits.float().std().to(out.logits.dtype) * 0.5
        return out


WRONG: dict[str, Callable[..., bool]] = {
    "beyond": lambda held, rows, beyond, padded, tree: beyond,
    "padded": lambda held, rows, beyond, padded, tree: padded,
    "padded or in trees": lambda held, rows, beyond, padded, tree: padded or tree,
    "padded or beyond": lambda held, rows, beyond, padded, tree: padded or beyond,
    "few": lambda held, rows, beyond, padded, tree: held > 0 and rows < 8,
}


def _found(wrong: str, window: int | None, dtype: torch.dtype = torch.float32) -> Any:
    """What a probe finds of a model that reads several tokens at once so."""
    kind = type("Wrong", (_Wrong,), {"wrong": staticmethod(WRONG[wrong])}) if wrong else MistralForCausalLM
    model = small_model(kind, dtype, sliding_window=window, max_position_embeddings=1 << 17)
    return probe(model, read_interface(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "mode", "positions"), [(16, "plain", 1 << 17), (4096, "tree", 4096)])
def test_the_probe_reads_beyond_every_window(window: int, mode: str, positions: int, dtype: torch.dtype) -> None:
    """Right below a long window, as a copy with a shorter one says."""
    assert _found("", window, dtype).mode == "tree"
    finding = _found("beyond", window, dtype)
    assert (finding.mode, finding.interface.max_positions) == (mode, positions)
    assert ("single steps" in finding.reason) == (mode == "plain")


@pytest.mark.parametrize(
    ("wrong", "mode", "positions"),
    [("padded", "tree", 1 << 17), ("padded or in trees", "chain", 1 << 17), ("padded or beyond", "tree", 4096)],
)
def test_padding_that_is_read_wrong_far_behind_is_not_drafted_for(wrong: str, mode: str, positions: int) -> None:
    """Only copies with shorter windows reach so far."""
    finding = _found(wrong, 4096)
    assert (finding.mode, finding.interface.max_positions) == (mode, positions)
    assert not finding.interface.takes_padding


def test_sixteen_bits_are_no_excuse() -> None:
    assert _found("", None, torch.bfloat16).mode == "tree"
    assert _found("few", None, torch.bfloat16).mode == "plain"


def test_a_length_that_cannot_be_tried_is_not_drafted_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    from retrieve_spec.verify import probe as probing

    monkeypatch.setattr(probing, "shrunk", lambda _model: None)
    model = small_model(MistralForCausalLM, sliding_window=60)
    ids = prompt(model, 50)
    wanted = model.generate(ids, max_new_tokens=24, do_sample=False)
    drafter = ScriptedDrafter(wanted[0], "right", vocab=199)
    rs.accelerate(model, drafter=drafter, nodes=8)
    assert torch.equal(model.generate(ids, max_new_tokens=24, do_sample=False), wanted)
    widths = [len(seen.tree) for seen in drafter.seen]
    assert np.count_nonzero(widths) == 2  # up to the window, and no further


def test_a_choice_of_keys_that_turns_on_rounding_is_not_drafted_beyond() -> None:
    """Sparse attention over all keys there are is exact; which ones it drops is not the same for several rows."""
    model = build("deepseek_v32", "causal")
    ids = prompt(model, 40)
    options = {"max_new_tokens": 40, "do_sample": False}
    wanted = model.generate(ids, **options)
    drafter = ScriptedDrafter(wanted[0], "right", vocab=200)
    rs.accelerate(model, drafter=drafter, nodes=8)
    assert model.speculation.mode == "chain"
    assert model.speculation.interface.max_positions == model.config.index_topk == 64
    assert not model.speculation.interface.takes_pieces
    assert torch.equal(model.generate(ids, **options), wanted)
    assert 3 <= np.count_nonzero([len(seen.tree) for seen in drafter.seen]) <= 4  # 24 tokens, six and a bonus each


def test_a_decoder_that_reads_padding_otherwise_in_several_rows_is_drafted_for_without_padding() -> None:
    model = build("led", "seq2seq")
    ids = prompt(model, 20)
    planted = Planted()
    rs.accelerate(model, drafter=planted, nodes=12)
    assert (model.speculation.mode, model.speculation.interface.takes_padding) == ("tree", False)
    begun = torch.tensor([[2, 9, 11, 13]])
    shown = torch.tensor([[0, 0, 1, 1]])
    for mask, mode in ((torch.ones_like(shown), "tree"), (shown, "plain")):
        given = {"input_ids": ids, "decoder_input_ids": begun, "decoder_attention_mask": mask}
        wanted = type(model).generate(model, **given, **GREEDY)
        planted.plant(wanted[0], 4, "branchy")
        assert torch.equal(model.generate(**given, **GREEDY), wanted)
        assert model.speculation.last.mode == mode
        assert ("padding" in model.speculation.last.reason) == (mode == "plain")


@pytest.mark.parametrize("name", ["t5", "bart", "marian"])
def test_decoders_of_encoder_decoders_are_drafted_for(name: str) -> None:
    model = build(name, "seq2seq")
    ids = prompt(model, 20)
    wanted = model.generate(ids, return_dict_in_generate=True, **GREEDY)
    planted = Planted()
    rs.accelerate(model, drafter=planted, nodes=12)
    planted.plant(wanted.sequences[0], 1, "right")
    got = model.generate(ids, return_dict_in_generate=True, **GREEDY)
    assert torch.equal(got.sequences, wanted.sequences)
    assert model.speculation.last.tokens_per_pass > 2
    assert type(got) is type(wanted)
    assert got.past_key_values.get_seq_length() == wanted.past_key_values.get_seq_length()
    drafted(model, {"inputs": ids, "decoder_input_ids": torch.tensor([[2, 9, 11, 13]])}, "half")


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon-alibi"])
def test_biases_by_key_are_those_of_nodes(name: str) -> None:
    """In half precision too, and where a bias has as many places as the text grows to."""
    family = next(family for family in FAMILIES if family.name == name)
    length = {"max_seq_len": 40} if name == "mpt" else {}
    model = build_family(Family(family.model_type, extra=family.extra | length, without=family.without), "eager")
    last = drafted(model, {"inputs": prompt(model, 28)}, "right", "branchy", nodes=24)
    assert model.speculation.mode == "tree"
    assert last.tokens_per_pass > 1.5
    rs.restore(model)
    rs.accelerate(model.to(torch.bfloat16), nodes=24)
    assert model.speculation.mode == "tree"


def test_a_hybrid_class_whose_layers_all_attend_keeps_no_state() -> None:
    """Granite 4 without Mamba layers; classes whose layers are unlike attention stay as they are."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    config = GraniteMoeHybridConfig(
        vocab_size=200, hidden_size=32, intermediate_size=48, num_hidden_layers=2, layer_types=["attention"] * 2,
        num_attention_heads=4, num_key_value_heads=2, mamba_n_heads=4, mamba_d_head=16, shared_intermediate_size=24,
        num_local_experts=0, eos_token_id=None,
    )  # fmt: skip
    model = GraniteMoeHybridForCausalLM(config).eval()
    drafted(model, {"inputs": prompt(model, 20)})
    assert model.speculation.mode == "tree"
    assert read_interface(build("deepseek_v4", "causal")).mode == "plain"


def test_what_an_encoder_reads_is_drafted_from() -> None:
    model = build("bart", "seq2seq")
    ids = prompt(model, 20)
    planted = Planted()
    seen = []
    planted.start = lambda prompt_ids, prediction_ids=None: seen.append(prompt_ids.tolist())  # type: ignore[method-assign]
    rs.accelerate(model, drafter=planted, nodes=4)
    model.generate(ids, max_new_tokens=3)
    assert seen == [[*ids[0].tolist(), 2]]
    for given in ({"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}):
        model.generate(ids, max_new_tokens=3, **given)
        assert model.speculation.last.mode == "delegated"


@pytest.mark.parametrize("name", ["gemma3", "qwen2_vl"])
def test_a_batch_with_pictures_is_left_to_generate(name: str) -> None:
    """Which picture belongs to which row only the model knows."""
    model = build(name, "image")
    one = picture_prompt(model)
    other = {given: value.flip(-1) * 0.5 if given == "pixel_values" else value for given, value in one.items()}
    inputs = {given: torch.cat([value, other[given]]) for given, value in one.items()}
    wanted = model.generate(**inputs, **GREEDY)
    rs.accelerate(model, nodes=8)
    assert torch.equal(model.generate(**inputs, **GREEDY), wanted)
    assert (model.speculation.last.mode, model.speculation.last.rows) == ("delegated", 1)
    assert "a batch is given" in model.speculation.last.reason


def test_a_model_keeps_what_it_kept_of_the_picture_while_it_is_examined() -> None:
    """Qwen-VL notes how far positions are behind slots when a call is prepared; a second turn goes on by that."""
    model = build("qwen2_vl", "image")
    inputs = picture_prompt(model)
    options = {"return_dict_in_generate": True, **GREEDY}

    def turns(generate: Any) -> torch.Tensor:
        first = generate(**inputs, **options)
        more = torch.cat([first.sequences, prompt(model, 6, 53)], dim=1)
        told: torch.Tensor = generate(more, past_key_values=first.past_key_values, **options).sequences
        return told

    wanted = turns(model.generate)
    rs.accelerate(model, nodes=8, recorded_pass="always")
    assert torch.equal(turns(model.generate), wanted)
    assert torch.equal(turns(model.generate), wanted)


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_prompts_of_embeddings(name: str) -> None:
    model = build(name, "causal")
    ids = prompt(model, 30)
    embeds = model.get_input_embeddings()(ids).detach()
    shown = torch.tensor([[0] * 4 + [1] * 30])
    front = torch.cat([torch.zeros_like(embeds[:, :4]), embeds], dim=1)
    calls: list[dict[str, Any]] = [
        {"input_ids": ids, "inputs_embeds": embeds, **GREEDY},
        {"inputs_embeds": front, "attention_mask": shown, "max_length": 45, "do_sample": False},
    ]
    wanted = [model.generate(**call) for call in calls]
    assert drafted(model, {"inputs_embeds": embeds}).tokens_per_pass > 1.5
    for call, answer in zip(calls, wanted, strict=True):
        assert torch.equal(model.generate(**call), answer)
    sampled = {"inputs_embeds": embeds, "max_new_tokens": 12, "do_sample": True, "seed": 3, "repetition_penalty": 1.2}
    assert torch.equal(model.generate(**sampled), model.generate(**sampled, draft="off"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("musicgen", "MusicgenForCausalLM has a generate of its own"), ("blt", "num_hidden_layers")],
    ids=["several tables of tokens", "a config that does not say what layers keep"],
)
def test_models_that_are_left_to_themselves(name: str, reason: str) -> None:
    model = rs.accelerate(build(name, "causal"))
    assert model.speculation.mode == "delegated"
    assert reason in model.speculation.reason


@pytest.mark.parametrize("recorded", ["always", "off"])
def test_a_prompt_with_a_picture_comes_in_one_piece(recorded: str) -> None:
    model = build("glm46v", "image")
    inputs = picture_prompt(model)
    wanted = model.generate(**inputs, **GREEDY)
    rs.accelerate(model, prefill_chunk=3, recorded_pass=recorded)
    assert torch.equal(model.generate(**inputs, **GREEDY), wanted)


def test_a_model_that_reads_pieces_of_prompts_otherwise_reads_whole_ones() -> None:
    """Moshi makes the mask of a window wrongly where several tokens follow a cache that is longer than it."""
    model = build("moshi", "causal")
    drafted(model, {"inputs": prompt(model, 23)}, prefill_chunk=7)
    assert model.speculation.mode == "tree"
    assert not model.speculation.interface.takes_pieces


@pytest.mark.parametrize(("name", "mapping"), [("m2m_100", "seq2seq"), ("kosmos-2.5", "image")])
def test_padding_tokens_in_drafts_do_not_move_those_behind_them(name: str, mapping: str) -> None:
    """These give a padding token no position, and count those behind it without it; Kosmos-2.5 names its arguments."""
    model = build(name, mapping)
    embeds = next(module for name, module in model.named_modules() if name.endswith("embed_positions"))
    embeds.weights.mul_(20.0)
    ids, padding = prompt(model, 12), model.config.get_text_config(decoder=True).pad_token_id

    def say_padding(text: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([padding]), 1e4) if text.shape[1] % 4 == 0 else scores

    inputs = {"inputs": ids, "logits_processor": [say_padding]}
    assert drafted(model, inputs, "right", "half", "branchy", new=20, nodes=16).tokens_per_pass > 1.5
