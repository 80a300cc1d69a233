"""What is used of FlashInfer, by its documentation, in plain torch: see ``flashinfer.prefill``."""

from typing import Any

import torch
from torch import Tensor

CREATED: list["BatchPrefillWithPagedKVCacheWrapper"] = []


class BatchPrefillWithPagedKVCacheWrapper:
    """Pages of [num_kv_heads, page_size, head_dim]; queries are the last of their sequences."""

    def __init__(self, workspace: Tensor, kv_layout: str) -> None:
        assert workspace.dtype is torch.uint8
        assert kv_layout == "HND"
        self.read: list[int] = []  # addresses of keys and of values that were read
        CREATED.append(self)

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        last_page_len: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        given = (qo_indptr, kv_indptr, kv_indices, last_page_len)
        assert all(each.dtype is torch.int32 for each in given)
        assert len(qo_indptr) == len(kv_indptr) == len(last_page_len) + 1
        assert causal
        self._plan = tuple(each.tolist() for each in given)
        self._shape = num_heads, num_kv_heads, page_size, head_dim
        self._scale, self._window_left = sm_scale, window_left
        self._dtypes = q_data_type, kv_data_type

    def run(self, q: Tensor, kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Any:
        keys, values = kv_cache
        num_heads, *page = self._shape
        assert keys.stride() == values.stride()
        assert list(keys.shape[1:]) == list(values.shape[1:]) == page
        assert (q.dtype, keys.dtype) == self._dtypes
        assert q.shape[1] == num_heads
        self.read += [keys.data_ptr(), values.data_ptr()]
        q_ends, page_ends, pages, last_lens = self._plan
        for n, last_len in enumerate(last_lens):
            own = pages[page_ends[n] : page_ends[n + 1]]
            length = (len(own) - 1) * page[1] + last_len
            k, v = (
                each[own]
                .transpose(1, 2)
                .flatten(0, 1)[:length]
                .repeat_interleave(num_heads // page[0], 1)
                for each in kv_cache
            )
            rows = q[q_ends[n] : q_ends[n + 1]]
            positions = torch.arange(length - len(rows), length)[:, None]
            seen = torch.arange(length)[None] <= positions
            if self._window_left >= 0:
                seen &= torch.arange(length)[None] >= positions - self._window_left
            scores = torch.einsum("qhd,khd->hqk", rows, k) * self._scale
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[q_ends[n] : q_ends[n + 1]] = torch.einsum("hqk,khd->qhd", weights, v)
        return out
