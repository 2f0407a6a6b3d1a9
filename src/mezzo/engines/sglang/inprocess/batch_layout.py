"""Many sequences as one batch of SGLang's, laid out at once instead of a request object at a time.

SGLang's own way from prompts to a batch makes an object for each request, matches it against the prefix tree, gives it a row and
returns its memory afterwards: some 0.13 ms a request, more than the forward of a short prompt. The sequences of a probe need none
of that singly: they begin with the same cached tokens, if any, and end together. So one request stands for all of a probe's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor


def laid_out(scheduler: Any, reqs: Sequence[Any], rows: Sequence[tuple[int, ...]]) -> Any:
    """A `ScheduleBatch` of all rows under each request, ready for a forward; `give_back` returns its memory.

    SGLang has matched the requests against its tree, all to the same length; every row begins with what was matched. The
    scheduler must be idle: rows of its request table are used without being taken, since nobody else can ask for one.
    """
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    table: Tensor = scheduler.req_to_token_pool.req_to_token
    matched = [_matched(scheduler.tree_cache, req) for req in reqs]
    members, known = len(reqs), len(matched[0])
    assert all(len(found) == known for found in matched)
    lengths = [len(row) for row in rows] * members
    fresh = [length - known for length in lengths]
    places = np.arange(1, len(lengths) + 1)  # row 0 is SGLang's padding
    tokens = np.fromiter(chain.from_iterable(row[known:] for row in rows), dtype=np.int64)
    columns = np.concatenate([np.arange(known, len(row)) for row in rows])
    sent = (np.tile(tokens, members), np.repeat(places, fresh), np.tile(columns, members), places, np.array(lengths))
    input_ids, owners, columns_there, places_there, lengths_there = _sent(sent, table.device)
    slots = scheduler.token_to_kv_pool_allocator.alloc(len(input_ids))
    table[owners, columns_there] = slots.to(table.dtype)
    for index, found in enumerate(matched if known else ()):
        first = 1 + index * len(rows)
        table[first : first + len(rows), :known] = found.to(table.dtype)
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
        req_pool_indices=places_there,
        req_pool_indices_cpu=torch.from_numpy(places),
        seq_lens=lengths_there,
        seq_lens_cpu=torch.tensor(lengths),
        orig_seq_lens=lengths_there.to(torch.int32),
        seq_lens_sum=sum(lengths),
        out_cache_loc=slots,
        prefix_lens=[known] * len(lengths),
        extend_lens=fresh,
        extend_num_tokens=len(input_ids),
        extend_logprob_start_lens=fresh,
        multimodal_inputs=[None] * len(lengths),
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
