"""The command line where torch sees one GPU, which does not work: nothing may be put there."""

import torch
import torch.distributed as dist

from suptickets.cli import program

init = dist.init_process_group
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.set_device = lambda _: None
dist.init_process_group = lambda *_, **__: init("gloo")
program()
