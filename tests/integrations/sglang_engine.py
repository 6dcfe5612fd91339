"""What SGLang does with drafts, as far as a worker sees it: requests, a scheduler, the walk down a tree, a model."""

import sys
from array import array
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
from made_up_model import says

WIDTH = 9


class Request:
    """A request with the attributes that SGLang's `Req` has, in its types."""

    def __init__(self, rid, prompt, max_new_tokens=40, top_k=1, embeds=None, **custom):
        self.rid = rid
        self.origin_input_ids_unpadded = array("q", prompt)
        self.output_ids = array("q")
        self.sampling_params = SimpleNamespace(max_new_tokens=max_new_tokens, top_k=top_k, custom_params=custom or None)
        self.input_embeds = embeds
        self.is_retracted = False
        self.finished_reason = None
        self.truth = list(prompt)  # with tokens that the scheduler has not seen yet
        self.accepted = ([0] * WIDTH, 1)  # of the step before

    def finished(self):
        return self.finished_reason is not None


def mode(name):
    """A member of `ForwardMode`, of which three are asked for here."""
    return SimpleNamespace(
        is_extend=lambda: name in ("EXTEND", "TARGET_VERIFY"),
        is_decode=lambda: name == "DECODE",
        is_target_verify=lambda: name == "TARGET_VERIFY",
    )


MODES = SimpleNamespace(**{name: mode(name) for name in ("EXTEND", "DECODE", "TARGET_VERIFY")})


def links(mask):
    """(first child, next sibling) int64 (b, n) of masks (b, n, n), as `reconstruct_indices_from_tree_mask` says."""
    rows, width, _ = mask.shape
    above = mask.astype(bool) & (np.arange(width) < np.arange(width)[:, None])
    child, sibling = np.full((2, rows, width), -1, np.int64)
    for b in range(rows):
        parents = [max(np.flatnonzero(above[b, i]), default=-1) for i in range(width)]
        for i in range(width):
            below = np.flatnonzero(above[b, :, i])
            child[b, i] = below[0] if len(below) else -1
            beside = [k for k in range(i + 1, width) if parents[k] == parents[i] >= 0]
            sibling[b, i] = beside[0] if beside else -1
    return child, sibling


def walk_greedy(candidates, child, sibling, predicted):
    """Nodes (indices, the root first) that are accepted in one tree, in the order of `VerifyTreeGreedy`."""
    accepted, at = [0], 0
    for _ in range(1, len(candidates)):
        at = child[at]
        while at != -1 and candidates[at] != predicted[accepted[-1]]:
            at = sibling[at]
        if at == -1:
            break
        accepted.append(int(at))
    return accepted


class Target:
    """The target's worker: what the model says behind every row of a batch, told from the mask alone."""

    tokenizer = None
    model_runner = SimpleNamespace(
        model_config=SimpleNamespace(vocab_size=100), max_running_requests=16, watermark_state=None
    )

    def get_memory_pool(self):
        return None, None

    def forward_batch_generation(self, batch, pp_proxy_tensors=None, is_verify=False):
        if not is_verify:
            said = [says(request.truth) for request in batch.reqs]
            ids = torch.tensor(said)
            return SimpleNamespace(logits_output=None, next_token_ids=ids, can_run_cuda_graph=False)
        given = batch.spec_info
        nodes = given.draft_token.reshape(len(batch.reqs), WIDTH).tolist()
        flat, said, used = given.custom_mask, [], 0
        for request, tokens in zip(batch.reqs, nodes, strict=True):
            past = len(request.truth) - 1
            assert tokens[0] == request.truth[-1]
            mask = flat[used : used + WIDTH * (past + WIDTH)].reshape(WIDTH, past + WIDTH)
            used += mask.numel()
            assert mask[:, :past].all()
            seen = [[token for token, looked in zip(tokens, row, strict=True) if looked] for row in mask[:, past:]]
            said.append([says(request.truth[:-1] + path) for path in seen])
        assert used == len(flat)
        logits = SimpleNamespace(next_token_logits=None, said=said)
        return SimpleNamespace(logits_output=logits, can_run_cuda_graph=False)


def eagle_sample(given, batch, logits_output, grammar_mask=None, watermark_state=None):
    """`eagle_sample` of a greedy batch: (what is predicted behind every row, numbers and indices of accepted ones)."""
    rows = len(batch.reqs)
    predict = torch.zeros(rows * WIDTH, dtype=torch.int32)
    index = torch.full((rows, given.max_tree_depth), -1, dtype=torch.int32)
    lengths = torch.zeros(rows, dtype=torch.int32)
    candidates = given.draft_token.reshape(rows, WIDTH).tolist()
    for b in range(rows):
        child, sibling = given.retrieve_next_token[b].tolist(), given.retrieve_next_sibling[b].tolist()
        accepted = walk_greedy(candidates[b], child, sibling, logits_output.said[b])
        for node in accepted:
            predict[b * WIDTH + node] = logits_output.said[b][node]
        lengths[b] = len(accepted)
        index[b, : len(accepted)] = torch.tensor(accepted, dtype=torch.int32) + b * WIDTH
    return predict, lengths, index


class NgramWorker:
    """What `NGRAMWorker` does between a batch and its result, in short."""

    def __init__(self, overlap=True, topk=10):
        self.enable_overlap, self.topk, self.draft_token_num = overlap, topk, WIDTH
        self.target_worker = Target()
        self.model_runner = Target.model_runner
        self.ngram_corpus = self._before = None

    def forward_batch_generation(self, batch):
        rows = len(batch.reqs)
        if batch.forward_mode.is_extend():
            result = self.target_worker.forward_batch_generation(batch)
            tokens = torch.zeros(rows, WIDTH, dtype=torch.int32)
            tokens[:, 0] = result.next_token_ids
            lengths = torch.ones(rows, dtype=torch.int32)
        else:
            ids, mask = self._prepare_draft_tokens(batch)
            assert ids.dtype == mask.dtype == np.int64 and ids.shape == (rows * WIDTH,)
            mask = mask.reshape(rows, WIDTH, WIDTH)
            child, sibling = map(torch.from_numpy, links(mask))
            past = [len(request.truth) - 1 for request in batch.reqs]
            full = [np.hstack([np.ones((WIDTH, n)), one]).ravel() for n, one in zip(past, mask, strict=True)]
            batch.spec_info = SimpleNamespace(
                draft_token=torch.from_numpy(ids),
                custom_mask=torch.from_numpy(np.concatenate(full)).bool(),
                retrieve_next_token=child,
                retrieve_next_sibling=sibling,
                max_tree_depth=WIDTH,
            )
            logits = self.target_worker.forward_batch_generation(batch, is_verify=True).logits_output
            predict, lengths, index = eagle_sample(batch.spec_info, batch, logits)
            tokens = predict[index]
            self._update_ngram_corpus(batch)
            names = {request.rid for request in batch.reqs}
            self.ngram_corpus.erase_match_state(list((self._before or names) - names))
            self._before = names
        return SimpleNamespace(next_draft_input=SimpleNamespace(accept_tokens=tokens.flatten(), accept_lens=lengths))


class Scheduler:
    """Rounds over changing batches; with overlap, a step's result is looked at when the next one has run."""

    def __init__(self, worker, seed=0, rows=4, retracts=0.0):
        self.worker, self.rows, self.retracts = worker, rows, retracts
        self.rng = np.random.default_rng(seed)
        self.waiting, self.running, self.texts = [], [], {}
        self.pending = None
        self.steps = self.accepted = 0

    def add(self, rid, **given):
        self.waiting.append(Request(rid, **given))

    def step(self):
        fresh = self.waiting[: self.rows - len(self.running)]
        batch = fresh or self.running
        if not batch:
            self._look()
            return
        self.waiting = self.waiting[len(fresh) :]
        lengths = torch.tensor([len(request.truth) - 1 + bool(fresh) for request in batch])
        given = SimpleNamespace(
            reqs=list(batch),
            forward_mode=MODES.EXTEND if fresh else MODES.DECODE,
            spec_info=SimpleNamespace(
                accept_tokens=torch.tensor([request.accepted[0] for request in batch], dtype=torch.int32).flatten(),
                accept_lens=torch.tensor([request.accepted[1] for request in batch], dtype=torch.int32),
            ),
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            grammar_needs_sync=lambda: False,
            has_grammar=False,
            return_logprob=False,
            sampling_info=SimpleNamespace(has_watermark_candidates=False),
            req_pool_indices=None,
            req_to_token_pool=SimpleNamespace(req_to_token=None),
        )
        for request in fresh:
            request.is_retracted = False
        found = self.worker.forward_batch_generation(given).next_draft_input
        tokens = found.accept_tokens.reshape(-1, WIDTH).tolist()
        results = []
        for request, row, length in zip(batch, tokens, found.accept_lens.tolist(), strict=True):
            assert 1 <= length <= WIDTH
            request.accepted = row, length
            request.truth += row[:length]
            results.append((request, row[:length]))
            self.steps += 1
            self.accepted += length - 1
        self.running += fresh
        if self.worker.enable_overlap:
            self._look()
            self.pending = results
        else:
            self._look(results)
        if self.running and self.rng.random() < self.retracts:
            self._retract()

    def _look(self, results=None):
        for request, tokens in results or self.pending or ():
            if request.finished():
                continue
            request.output_ids.extend(tokens)
            limit = request.sampling_params.max_new_tokens
            if len(request.output_ids) >= limit:
                del request.output_ids[limit:]
                request.finished_reason = "length"
                self.texts[request.rid] = [*request.origin_input_ids_unpadded, *request.output_ids]
        self.pending = None
        self.running = [request for request in self.running if not request.finished()]

    def _retract(self):
        self._look()
        if self.running:
            request = self.running.pop(int(self.rng.integers(len(self.running))))
            request.is_retracted = True
            self.waiting.append(request)

    def serve(self):
        while self.waiting or self.running or self.pending:
            self.step()
        return self.texts


def pretend_modules(monkeypatch, rank=0, world=1, **found):
    """Stand in for the module of SGLang that a worker asks where it is."""
    group = SimpleNamespace(rank_in_group=rank, world_size=world, first_rank=0, cpu_group=None)
    context = ModuleType("sglang.srt.runtime_context")
    context.get_parallel = lambda: SimpleNamespace(tp_group=group, dp_rank=None)
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, context.__name__, context)
