"""Print by how many MB one request raises the memory of a process that has served a small one before.

python examples/peak_memory.py model.pt2 inputs.pt        (inputs.pt: a small request and the one to measure)
"""

import sys
from pathlib import Path

import torch


def status_kb(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])


torch.set_num_threads(2)
model = torch._inductor.aoti_load_package(sys.argv[1])
small, measured = torch.load(sys.argv[2])
model(*small)
Path("/proc/self/clear_refs").write_text("5")  # from now on the peak is counted anew
before = status_kb("VmRSS")
model(*measured)
print((status_kb("VmHWM") - before) / 1024)
