"""A stage under torch.distributed.pipelining, a slice of a model's layers, can be wrapped."""

from __future__ import annotations

import pytest
from torch import nn

from latentscan.ir.errors import RefusedError
from latentscan.runtime.wrap import wrap
from latentscan.tests.distributed.launch import launch
from latentscan.tests.models import build


@pytest.mark.slow
def test_two_wrapped_stages_train_as_the_whole_model_does(tmp_path):
    cases = [
        {"family": "llama", "pipeline": "", "schedule": "ScheduleGPipe"},
        {"family": "deepseek_v3", "pipeline": "mla-mm-split,mla-absorb", "schedule": "Schedule1F1B"},
    ]
    for ranks in launch(2, cases, tmp_path, worker="pipeline_worker"):
        for found in ranks:
            assert 0 < found["gradients"] < 5e-6
            assert found["loss"] < 1e-5


def test_layers_alone_are_refused_by_name():
    layers = nn.Sequential(*build("llama").model.layers)  # type: ignore[union-attr]
    with pytest.raises(RefusedError, match="Sequential: it is not a Hugging Face language model"):
        wrap(layers, "")
