"""A model split over processes of this machine: what is checked before, and how they find each other."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from kvkeep.errors import BadParameter, MissingExtra, UnsupportedModel
from kvkeep.model.load import check_device, load_config

HOST = "127.0.0.1"
PATIENCE = timedelta(minutes=30)  # of a process that waits for another one in a forward pass


def check_split(name: str, size: int, device: str | None) -> str:
    """Refuse what cannot be split over so many processes, before any is started. -> the kind of their devices"""
    if find_spec("transformers.distributed.tensor_parallel") is None:
        raise MissingExtra("--tensor-parallel needs transformers 5.17 or newer; run `pip install -U transformers`.")
    found = check_device(device)[0]
    if found.index is not None:
        raise BadParameter(
            f"--device {device}: --tensor-parallel {size} takes the first {size} GPUs; use --device {found.type}, and "
            "CUDA_VISIBLE_DEVICES to choose others."
        )
    if found.type == "cuda" and (gpus := torch.cuda.device_count()) < size:
        raise BadParameter(f"--tensor-parallel {size} takes a GPU each, and there are {gpus}; use {gpus} or fewer.")
    config = load_config(name).get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if heads % size:
        others = [str(each) for each in range(2, heads + 1) if heads % each == 0]
        raise UnsupportedModel(
            f"--tensor-parallel {size}: the model {name!r} has {heads} KV heads, which cannot be split over {size} "
            f"processes; use {' or '.join(others) or 'one process'}."
        )
    return found.type


@dataclass(frozen=True)
class Place:
    """The place of one process among those that share a model."""

    rank: int
    size: int
    device: str  # cpu or cuda
    port: int = 0  # where the first one listens

    def listen(self) -> Any:
        """Listen, as the first process, at a free port where the others meet it. No other machine can connect."""
        with socket.socket() as bound:
            bound.bind((HOST, 0))
            bound.listen()
            port, descriptor = bound.getsockname()[1], bound.detach()  # by itself, torch listens to the whole network
        options: dict[str, Any] = {"wait_for_workers": False, "timeout": PATIENCE, "master_listen_fd": descriptor}
        return dist.TCPStore(HOST, port, self.size, is_master=True, **options)

    def join(self, meeting: Any = None) -> None:
        """Join the others, and wait until all have come. meeting: of the process that listens"""
        os.environ["LOCAL_RANK"] = str(self.rank)  # transformers takes the device from it
        options: dict[str, Any] = {"backend": "gloo"}
        if self.device == "cpu":
            if sys.platform == "linux":
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers would take a GPU where there is one
            if "OMP_NUM_THREADS" not in os.environ:
                torch.set_num_threads(max(1, torch.get_num_threads() // self.size))
        else:
            torch.cuda.set_device(self.rank)
            options = {"backend": "nccl", "device_id": torch.device("cuda", self.rank)}
        meeting = meeting or dist.TCPStore(HOST, self.port, self.size, is_master=False, timeout=PATIENCE)
        dist.init_process_group(store=meeting, rank=self.rank, world_size=self.size, timeout=PATIENCE, **options)
