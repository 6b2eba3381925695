"""Compiles Triton and Gluon kernels for GPUs that need not be there, and reads what the compiler did.

`compile_kernel` gives a `Compiled`; `assert_no_spills`, `assert_fits` and `assert_wgmma_pipelined` are the checks
that every Hopper kernel has to pass; `sass_positions` is for the order of instructions.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest

triton = pytest.importorskip("triton")

HOPPER_SHARED_MEMORY = 232448
"""Bytes of shared memory that one block can have on compute capability 9.0."""

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel: Triton's own object and what can be read off its machine code."""

    kernel: Any
    target: str

    @property
    def shared_memory(self) -> int:
        return int(self.kernel.metadata.shared)

    @cached_property
    def sass(self) -> str:
        return _nvidia_tool("cuobjdump", ["-sass"], self.kernel.asm["cubin"], ".cubin")

    @cached_property
    def resources(self) -> dict[str, int]:
        """REG, STACK, LOCAL and SHARED of the kernel."""
        text = _nvidia_tool("cuobjdump", ["-res-usage"], self.kernel.asm["cubin"], ".cubin")
        found = re.search(r"REG:(\d+).*?STACK:(\d+).*?SHARED:(\d+).*?LOCAL:(\d+)", text)
        assert found, f"no resource line in {text!r}"
        return dict(zip(("REG", "STACK", "SHARED", "LOCAL"), map(int, found.groups()), strict=True))

    @cached_property
    def ptxas_log(self) -> str:
        """What the assembler says, such as that it serialised wgmma (C7510 and its neighbours) or ignored
        setmaxnreg."""
        arguments = ["-v", f"--gpu-name={self.target}a", "-o", os.devnull]
        ptx = self.kernel.asm["ptx"].encode()
        try:
            return _nvidia_tool("ptxas", arguments, ptx, ".ptx")
        except subprocess.CalledProcessError:  # from Triton 3.9 on, the PTX is of a version that only this one reads
            return _nvidia_tool("ptxas-blackwell", arguments, ptx, ".ptx")

    def opcodes(self) -> Counter[str]:
        """How often each SASS opcode occurs, without its modifiers."""
        return Counter(name.split(".")[0] for name, _ in self.sass_positions("."))

    def sass_positions(self, pattern: str) -> list[tuple[str, int]]:
        """(instruction with modifiers, place) of the instructions that match, in the order of the code."""
        instructions = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", self.sass)
        return [(name, place) for place, name in enumerate(instructions) if re.match(pattern, name)]


def compile_kernel(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    *,
    target: str = "sm_90",
    aligned: Sequence[str] = (),
    **options: Any,
) -> Compiled:
    """Compile a `@triton.jit` or `@gluon.jit` function ahead of any launch.

    Args:
        kernel: the function.
        signature: the type of every argument that is not in `constexprs`: "*fp16", "i32", "fp32", or `descriptor(...)`.
        constexprs: the values of the constexpr arguments.
        target: a key of `TARGETS`.
        aligned: the arguments that are divisible by 16, as the launcher would find out.
        **options: `num_warps`, `num_stages`, …
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    types = {name: "constexpr" if name in constexprs else signature[name] for name in kernel.arg_names}
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source_class = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = source_class(fn=kernel, signature=types, constexprs=dict(constexprs), attrs=attributes)
    return Compiled(triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options), target)


def descriptor(dtype: str, block: Sequence[int], layout: Any = None) -> str:
    """The signature of a TMA descriptor argument of a Gluon kernel; `layout` defaults to the widest swizzle."""
    from triton.experimental.gluon import language as gl

    element = {"fp16": gl.float16, "bf16": gl.bfloat16, "fp32": gl.float32}[dtype]
    layout = layout or gl.NVMMASharedLayout.get_default_for(list(block), element)
    return f"tensordesc<{dtype}{list(block)},{layout!r}>"


def assert_no_spills(compiled: Compiled) -> None:
    """No register went to local memory."""
    assert compiled.resources["STACK"] == 0, compiled.resources
    opcodes = compiled.opcodes()
    assert opcodes["STL"] + opcodes["LDL"] == 0, opcodes


def assert_fits(compiled: Compiled, limit: int = HOPPER_SHARED_MEMORY) -> None:
    """A block of the kernel can be launched."""
    assert compiled.shared_memory <= limit, f"{compiled.shared_memory} bytes of shared memory, the limit is {limit}"


def assert_wgmma_pipelined(compiled: Compiled) -> None:
    """The kernel uses Hopper's matrix instruction, and the assembler left it asynchronous and honoured setmaxnreg."""
    assert compiled.opcodes()["HGMMA"] > 0, "no HGMMA in the machine code"
    complaints = [line for line in compiled.ptxas_log.splitlines() if re.search(r"C75\d\d|wgmma|setmaxnreg", line)]
    assert not complaints, "\n".join(complaints)


def _nvidia_tool(tool: str, arguments: list[str], content: bytes, suffix: str) -> str:
    """Standard output and error of a tool of Triton's NVIDIA backend on a file with `content`."""
    import triton.backends.nvidia

    folder = os.path.join(os.path.dirname(triton.backends.nvidia.__file__), "bin")
    with tempfile.NamedTemporaryFile(suffix=suffix) as file:
        file.write(content)
        file.flush()
        done = subprocess.run(
            [os.path.join(folder, tool), *arguments, file.name], capture_output=True, text=True, check=True
        )
    return done.stdout + done.stderr
