"""Many sequences as one batch of SGLang's, laid out at once instead of a request object at a time.

SGLang's own way from prompts to a batch makes an object for each request, matches it against the prefix tree, gives it a row and
returns its memory afterwards: some 0.13 ms a request, more than the forward of a short prompt. The sequences of a probe need none
of that singly: they begin with the same cached tokens, if any, and end together. So one request stands for all of a probe's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Group = tuple[Any, Sequence[tuple[int, ...]]]
"""A request that SGLang has matched against its tree, and the sequences it stands for: all begin with what was matched."""


def laid_out(scheduler: Any, groups: Sequence[Group]) -> Any:
    """A `ScheduleBatch` ready for a forward; `give_back` returns its memory. The scheduler must be idle: rows of its request
    table are used without being taken, since nobody else can ask for one."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    table: Tensor = scheduler.req_to_token_pool.req_to_token
    matched = [_matched(scheduler.tree_cache, req) for req, _ in groups]
    known = [len(found) for found, (_, rows) in zip(matched, groups, strict=True) for _ in rows]
    ids = [np.asarray(row, dtype=np.int64) for _, rows in groups for row in rows]
    lengths, fresh = [len(row) for row in ids], [len(row) - kept for row, kept in zip(ids, known, strict=True)]
    count, total = len(ids), sum(fresh)
    rows = np.arange(1, count + 1)  # row 0 is SGLang's padding
    columns = np.concatenate([np.arange(kept, length) for kept, length in zip(known, lengths, strict=True)])
    tokens = np.concatenate([row[kept:] for row, kept in zip(ids, known, strict=True)])
    sent = _sent((tokens, np.repeat(rows, fresh), columns, rows, np.array(lengths)), table.device)
    input_ids, owners, columns_there, rows_there, lengths_there = sent
    slots = scheduler.token_to_kv_pool_allocator.alloc(total)
    table[owners, columns_there] = slots.to(table.dtype)
    first = 1
    for found, (_, group) in zip(matched, groups, strict=True):
        if len(found):
            table[first : first + len(group), : len(found)] = found.to(table.dtype)
        first += len(group)
    return ScheduleBatch(
        reqs=[req for req, group in groups for _ in group],
        req_to_token_pool=scheduler.req_to_token_pool,
        token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
        tree_cache=scheduler.tree_cache,
        model_config=scheduler.model_config,
        device=scheduler.req_to_token_pool.device,
        spec_algorithm=scheduler.spec_algorithm,
        forward_mode=ForwardMode.EXTEND,
        input_ids=input_ids,
        req_pool_indices=rows_there,
        req_pool_indices_cpu=torch.from_numpy(rows),
        seq_lens=lengths_there,
        seq_lens_cpu=torch.tensor(lengths),
        orig_seq_lens=lengths_there.to(torch.int32),
        seq_lens_sum=sum(lengths),
        out_cache_loc=slots,
        prefix_lens=known,
        extend_lens=fresh,
        extend_num_tokens=total,
        extend_logprob_start_lens=fresh,
        multimodal_inputs=[None] * count,
    )


def give_back(batch: Any) -> None:
    """Return the memory of a batch that was laid out here; what was matched in the tree stays there."""
    batch.token_to_kv_pool_allocator.free(batch.out_cache_loc)


def _matched(tree: Any, req: Any) -> Tensor:
    """Where SGLang's tree holds the beginning of a request."""
    if hasattr(req, "prefix_indices"):  # up to 0.5.17
        return req.prefix_indices  # type: ignore[no-any-return]
    return tree.prefix_device_indices(req) if req.prefix_len else torch.empty(0, dtype=torch.int64)


def _sent(arrays: Sequence[np.ndarray[Any, Any]], device: torch.device) -> tuple[Tensor, ...]:
    """The arrays on the device, by one copy that nobody waits for."""
    packed = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    return torch.split(packed, [len(array) for array in arrays])  # type: ignore[no-any-return, no-untyped-call, unused-ignore]
