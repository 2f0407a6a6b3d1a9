"""SGLang's scheduler: its pools, requests, batches and forwards.

SGLang's own way from prompts to a batch makes an object for each request, matches it against the prefix tree, gives it a row of
the request table and frees its memory afterwards: about 0.13 ms per request, more than the forward of a short prompt. The rows of
a probe begin with the same cached tokens, if any, and end together, so one request object stands for all of them.
"""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mezzo.engines.sglang.internals.adapter_slots import AdapterSlots


@dataclass(frozen=True, slots=True)
class ServedProbe:
    """A probe as SGLang serves it: an adapter (None: the base weights) and a key in the prefix cache."""

    adapter: str | None
    cache_key: str


class Internals:
    """The parts of one scheduler that forwards borrow. The scheduler must be idle."""

    def __init__(self, scheduler: Any) -> None:
        from sglang.srt.mem_cache.common import release_kv_cache
        from sglang.srt.sampling.sampling_params import SamplingParams

        self.scheduler = scheduler
        self.runner = scheduler.tp_worker.model_runner
        self.model, self.device = self.runner.model, torch.device(self.runner.device)
        self.rank = int(scheduler.tp_group.rank_in_group)
        self.causal = bool(scheduler.is_generation)
        self._requests = 0
        self._generate_nothing = SamplingParams(max_new_tokens=0, temperature=0)
        # The option is `checkpoint` in new versions and `is_insert` in old ones: whether the tree keeps the tokens.
        keep = "checkpoint" if "checkpoint" in inspect.signature(release_kv_cache).parameters else "is_insert"
        self._release: Any = lambda req, cache: release_kv_cache(req, scheduler.tree_cache, **{keep: cache})

    # ---- state

    def flush(self) -> bool:
        """Empty the prefix cache and the pools; False while requests are still running."""
        return bool(self.scheduler.flush_cache(empty_cache=False))

    def is_idle(self) -> bool:
        return bool(self.scheduler.is_fully_idle())

    def most_sequences(self) -> int:
        return int(self.scheduler.req_to_token_pool.size)

    def free_tokens(self) -> int:
        return int(self.scheduler.token_to_kv_pool_allocator.available_size())

    def adapter_slots(self, names: Sequence[str]) -> AdapterSlots:
        return AdapterSlots(self.runner.lora_manager, names)

    # ---- forwards

    def extend(
        self, sequences: Sequence[tuple[tuple[int, ...], int, ServedProbe]], cache: bool
    ) -> tuple[Any, list[int]]:
        """The output of a forward of (tokens, logprob_start, probe) in SGLang's own way, and the number of cached tokens of each.

        Each is matched against the prefix tree and, with `cache`, kept in it.
        """
        reqs = [self.request(ids, start, probe) for ids, start, probe in sequences]
        for req in reqs:
            self._pin(req)
        output = self.scheduler.tp_worker.forward_batch_generation(self._batch(reqs), is_verify=True).logits_output
        cached = [int(req.cached_tokens) for req in reqs]
        allocator = self.scheduler.token_to_kv_pool_allocator
        allocator.free_group_begin()  # one operation for all of them
        for req in reqs:
            self._release(req, cache)
        allocator.free_group_end()
        return output, cached

    def _pin(self, req: Any) -> None:
        """Lock what the tree holds of a request: 0.5.20 and 0.5.21 unlock it when they release the request."""
        if hasattr(req, "lock_receipt") and req.last_node is not None:
            req.lock_receipt = self.scheduler.tree_cache.inc_lock_ref(req.last_node).to_dec_params()

    def generate(self, batch: Any) -> Tensor:
        """The next-token logits of a batch of a causal model."""
        logits: Tensor = self.scheduler.tp_worker.forward_batch_generation(
            batch, is_verify=True
        ).logits_output.next_token_logits
        return logits

    def embed(self, batch: Any) -> Tensor:
        """The embeddings of a batch of an encoder."""
        result = self.scheduler.tp_worker.forward_batch_embedding(batch)
        output = result[0] if isinstance(result, tuple) else result
        return torch.as_tensor(output.embeddings if hasattr(output, "embeddings") else output)

    def free(self, batch: Any) -> None:
        """Free the memory of a batch that `build_batch` made."""
        batch.token_to_kv_pool_allocator.free(batch.out_cache_loc)

    def request(self, ids: tuple[int, ...], logprob_start: int, probe: ServedProbe) -> Any:
        from sglang.srt.managers.schedule_batch import Req

        self._requests += 1
        req = Req(
            rid=f"mezzo-{self._requests}",
            origin_input_text="",
            origin_input_ids=array("q", ids),
            sampling_params=self._generate_nothing,
            return_logprob=logprob_start >= 0,
            lora_id=probe.adapter,
            extra_key=probe.cache_key,
            vocab_size=self.runner.model_config.vocab_size,
        )
        req.logprob_start_len = logprob_start
        req.init_next_round_input(self.scheduler.tree_cache)
        if hasattr(req, "set_extend_range"):  # up to 0.5.17
            req.set_extend_range(len(req.prefix_indices), len(ids))
        else:
            req.extend_end = len(ids)
        return req

    def _batch(self, reqs: list[Any]) -> Any:
        """SGLang's own way to a batch."""
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        scheduler = self.scheduler
        batch = ScheduleBatch.init_new(
            reqs,
            scheduler.req_to_token_pool,
            scheduler.token_to_kv_pool_allocator,
            scheduler.tree_cache,
            scheduler.model_config,
            False,
            scheduler.spec_algorithm,
        )
        batch.prepare_for_extend()
        if batch.input_ids is None:
            batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device)
            batch.prefill_input_ids_cpu = None
        return batch


def build_batch(scheduler: Any, reqs: Sequence[Any], rows: Sequence[tuple[int, ...]]) -> Any:
    """A `ScheduleBatch` of all rows under each request, ready for a forward; the caller frees its `out_cache_loc`.

    SGLang has matched the requests against its tree, all to the same length, and every row begins with the matched tokens. The
    scheduler must be idle: entries of its request table are used without being allocated, since nobody else can request one.
    """
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    table: Tensor = scheduler.req_to_token_pool.req_to_token
    prefixes = [_cached_prefix(scheduler.tree_cache, req) for req in reqs]
    cached = len(prefixes[0])
    assert all(len(prefix) == cached for prefix in prefixes)
    lengths = [len(row) for row in rows] * len(reqs)
    extend_lengths = [length - cached for length in lengths]
    entries = np.arange(1, len(lengths) + 1)  # entry 0 is SGLang's padding
    tokens = np.fromiter(chain.from_iterable(row[cached:] for row in rows), dtype=np.int64)
    columns = np.concatenate([np.arange(cached, len(row)) for row in rows])
    input_ids, token_entries, token_columns, pool_indices, seq_lens = _to_device(
        table.device,
        np.tile(tokens, len(reqs)),
        np.repeat(entries, extend_lengths),
        np.tile(columns, len(reqs)),
        entries,
        np.array(lengths),
    )
    slots = scheduler.token_to_kv_pool_allocator.alloc(len(input_ids))
    table[token_entries, token_columns] = slots.to(table.dtype)
    for index, prefix in enumerate(prefixes if cached else ()):
        first = 1 + index * len(rows)
        table[first : first + len(rows), :cached] = prefix.to(table.dtype)
    return ScheduleBatch(
        reqs=[req for req in reqs for _ in rows],
        req_to_token_pool=scheduler.req_to_token_pool,
        token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
        tree_cache=scheduler.tree_cache,
        model_config=scheduler.model_config,
        device=scheduler.req_to_token_pool.device,
        spec_algorithm=scheduler.spec_algorithm,
        forward_mode=ForwardMode.EXTEND,
        input_ids=input_ids,
        req_pool_indices=pool_indices,
        req_pool_indices_cpu=torch.from_numpy(entries),
        seq_lens=seq_lens,
        seq_lens_cpu=torch.tensor(lengths),
        orig_seq_lens=seq_lens.to(torch.int32),
        seq_lens_sum=sum(lengths),
        out_cache_loc=slots,
        prefix_lens=[cached] * len(lengths),
        extend_lens=extend_lengths,
        extend_num_tokens=len(input_ids),
        extend_logprob_start_lens=extend_lengths,
        multimodal_inputs=[None] * len(lengths),
    )


def _cached_prefix(tree: Any, req: Any) -> Tensor:
    """Where SGLang's tree holds the beginning of a request."""
    if hasattr(req, "prefix_indices"):  # up to 0.5.17
        return req.prefix_indices
    return tree.prefix_device_indices(req) if req.prefix_len else torch.empty(0, dtype=torch.int64)


def _to_device(device: torch.device, *arrays: np.ndarray[Any, Any]) -> tuple[Tensor, ...]:
    """Move the arrays to the device in one asynchronous copy."""
    joined = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        joined = joined.pin_memory().to(device, non_blocking=True)
    return torch.split(joined, [len(array) for array in arrays])  # type: ignore[no-untyped-call, unused-ignore]
