"""Checks of machine code (SASS) for what ptxas is known to compile wrongly."""

from __future__ import annotations

import re

from triton.compiler import CompiledKernel

# Conversions to float8 in PTX, and R1, NVIDIA's stack pointer, stored or read as two bytes in machine code.
_TO_FLOAT8 = re.compile(r"\bcvt\.rn\.satfinite\.e[45]m[23]x2")
_STACK_POINTER_STORED = re.compile(r"\bST[GS]\S* [^;]*, R1 ?;|\bPRMT \w+, R1\b[^,]*, 0x9910\b")
# An instruction with its operands, without its predicate.
_INSTRUCTION = re.compile(r"\t(?:@!?U?P\d+ )?([\w.]+) +([^;]*)")
_UNIFORM = re.compile(r"\bUR(\d+)")
# Instructions that move a descriptor, or advance it by a constant.
_MOVES = ("UMOV", "UIADD3", "UIADD3.64")


def stores_stack_pointer(compiled: CompiledKernel) -> bool:
    """Return whether machine code stores the stack pointer as data.

    ptxas 12.8 does, where a pair of float8 numbers is stored one by one and also packed with another pair.
    """
    if not _TO_FLOAT8.search(compiled.asm["ptx"]):
        return False
    return _STACK_POINTER_STORED.search(compiled.asm["sass"]) is not None


def has_broken_descriptors(compiled: CompiledKernel) -> bool:
    """Return whether a warp-group product's shared-memory descriptor comes from a kernel argument.

    ptxas 12.8 compiles such products where two products of a loop read the same shared memory in different layouts. It
    advances a register that it has not loaded with the descriptor.
    """
    return "wgmma" in compiled.asm["ptx"] and bool(broken_descriptors(compiled.asm["sass"]))


def broken_descriptors(sass: str) -> list[str]:
    """Return the warp-group products whose descriptors are kernel arguments, moved or advanced by constants.

    Instructions are followed in text order. A right descriptor has been shifted and masked since its base was loaded.
    """
    arguments: set[int] = set()
    found = []
    for name, text in _INSTRUCTION.findall(sass):
        operands = [each.strip() for each in text.split(",")]
        if name.startswith("HGMMA"):
            if _descriptors(operands) & arguments:
                found.append(f"{name} {text}")
            continue
        written = _UNIFORM.fullmatch(operands[0])
        if written is None:
            continue
        register = int(written[1])
        registers = {register, register + 1} if ".64" in name else {register}
        read = {int(each) for operand in operands[1:] for each in _UNIFORM.findall(operand)}
        moved = name in _MOVES and read & arguments
        arguments -= registers
        if name.startswith("ULDC"):
            arguments |= registers
        elif moved:
            arguments.add(register)
    return found


def _descriptors(operands: list[str]) -> set[int]:
    """Return the low registers of the descriptors that a product reads.

    `gdesc[URn]` names four registers: both operands' descriptors, of two registers each. If the first operand is in
    vector registers, only the second pair is read.
    """
    for place, operand in enumerate(operands):
        if operand.startswith("gdesc[") and (named := _UNIFORM.search(operand)):
            first = int(named[1])
            return {first + 2} if place > 1 else {first, first + 2}
    return set()
