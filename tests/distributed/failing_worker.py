"""One rank of a job in which another rank fails in the middle of a training step.

Arguments: rank, world size, rendezvous file, result file, pipeline, time-out in seconds, and what the last rank does
instead of its second backward pass: ``kill`` (it is killed) or ``late`` (it computes for too long).

The others write the error that they end with, and the seconds until it came, to RESULT.<rank>.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from latentscan.ir.errors import MeshError
from latentscan.runtime.wrap import wrap
from latentscan.tests.models import build
from latentscan.tests.runtime.helpers import tokens

torch.set_num_threads(1)


def main() -> None:
    rank, world, rendezvous, result, pipeline, seconds, what = sys.argv[1:]
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=int(world), timeout=timedelta(minutes=5)
    )
    model = build("llama", num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=4).train()
    wrap(model, pipeline, mesh=f"tp={world}", timeout=float(seconds))
    ids = tokens(2, 9)
    model(ids, labels=ids, use_cache=False).loss.backward()
    loss = model(ids, labels=ids, use_cache=False).loss
    if int(rank) == int(world) - 1 and what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if int(rank) == int(world) - 1 and what == "late":
        time.sleep(float(seconds) + 12)
        os._exit(0)
    began = time.monotonic()
    try:
        loss.backward()
        told = {"error": "", "text": ""}
    except MeshError as error:
        told = {"error": type(error).__name__, "text": str(error)}
    except RuntimeError as error:
        told = {"error": type(error).__name__, "text": str(error)}
    with open(f"{result}.{rank}", "w", encoding="utf-8") as file:
        json.dump({**told, "seconds": time.monotonic() - began}, file)
    os._exit(0)


if __name__ == "__main__":
    main()
