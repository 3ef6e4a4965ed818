"""The skip rule of device tests and the settings that tests/conftest.py makes."""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch

from latentscan.tests.conftest import missing_device


@pytest.mark.parametrize(
    ("mark", "there", "reason"),
    [
        ((), 0, "needs 1 cuda device, found 0"),
        ((), 1, None),
        (("cuda", 2), 1, "needs 2 cuda devices, found 1"),
        (("cuda", 2), 8, None),
        (("npu",), 0, "needs 1 npu device, found 0"),
    ],
)
def test_a_device_test_is_skipped_with_the_reason(mark: tuple, there: int, reason: str | None):
    assert missing_device(*mark, found=lambda kind: there) == reason


def test_an_unknown_device_kind_is_an_error():
    with pytest.raises(ValueError, match="unknown device kind 'gpu'"):
        missing_device("gpu")


@pytest.mark.device(count=1_000)
def test_the_device_mark_reaches_the_skip_rule():
    pytest.fail("ran on a machine without a thousand accelerators")


def test_tests_are_single_threaded_offline_and_repeatable():
    assert torch.get_num_threads() == 1
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    profile = hypothesis.settings()
    assert profile.derandomize
    assert profile.deadline is None


def test_dynamo_is_reset_between_tests(pytestconfig: pytest.Config, request: pytest.FixtureRequest):
    assert "fresh_dynamo" in request.fixturenames
