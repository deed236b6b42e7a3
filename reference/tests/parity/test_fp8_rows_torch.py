"""Codes of fp8 cache rows against those of torch.float8_e4m3fn."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="parity tests need torch (extra `parity`)")

import torch

from reference.fp8_row import dequantize_rows, e4m3fn_codes, quantize_rows


def test_codes_of_every_bf16_number_equal_torch():
    values = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    values = values[np.abs(values) <= 448]
    expected = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(e4m3fn_codes(values), expected)


def test_rows_equal_torch():
    generator = torch.Generator().manual_seed(0)
    latent = (torch.randn((20, 4, 128), generator=generator) * torch.rand((20, 4, 1), generator=generator) * 9).to(
        torch.bfloat16
    )
    rope = torch.randn((20, 64), generator=generator).to(torch.bfloat16)
    largest = latent.float().abs().amax(dim=-1, keepdim=True)
    scale = torch.pow(2.0, torch.ceil(torch.log2(largest / 448)))
    codes = (latent.float() / scale).to(torch.float8_e4m3fn)
    expected = torch.cat(
        [codes.view(torch.uint8).reshape(20, 512), scale.reshape(20, 4).view(torch.uint8), rope.view(torch.uint8)], 1
    )
    rows = quantize_rows(latent.float().reshape(20, 512).numpy(), rope.float().numpy())
    np.testing.assert_array_equal(rows, expected.numpy())
    values = (codes.float() * scale).to(torch.bfloat16).float().reshape(20, 512)
    np.testing.assert_array_equal(dequantize_rows(rows)[0], values.numpy())
