"""`veca.utils.device`: streams beside the model's."""

from __future__ import annotations

import pytest
import torch

from veca.utils.device import side_stream


def test_a_stream_is_made_once_for_each_use(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: made.append(device) or object())
    first, second = torch.device("cuda", 98), torch.device("cuda", 99)  # of no machine: streams are kept
    streams = [side_stream(device, use) for _ in range(40) for device in (first, second) for use in ("one", "other")]
    assert made == [first, first, second, second]
    assert len(set(streams)) == 4


@pytest.mark.gpu
def test_gpu_streams_of_many_runs_are_never_the_one_that_graphs_are_recorded_on() -> None:
    device = torch.device("cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        recorded = torch.cuda.current_stream()
    assert all(side_stream(device, "loader") != recorded for _ in range(64))
