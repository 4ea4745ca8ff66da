"""Changes to Triton's interpreter while it runs a kernel, so that it computes what a GPU computes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import triton
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import GridExecutor, InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tritonite import devices
from tritonite.errors import Decline, InvalidDeclaration
from tritonite.runtime import contract, progress
from tritonite.runtime.locks import fork_safe_lock
from tritonite.runtime.nested import retyped

_INTERPRETED = (
    "kernels run in Triton's interpreter on the CPU, thousands of times slower than on a GPU: no GPU is used here, or "
    "TRITON_INTERPRET is set"
)
_lock = fork_safe_lock()


@contextlib.contextmanager
def reading_on_host() -> Iterator[None]:
    """Let a host function read CPU data with ATen's operators within the with block. No plan is made of the call.

    A dry recorder watches the block, so that nothing is written and hollow tensors are not read.
    """
    outer = contract.swap_inside_kernel(True)
    recorder = contract.recorder()
    if recorder is not None:
        recorder.unrecordable("the host reads data that is on the CPU")
    watching = recorder.watch() if recorder is not None and recorder.dry else contextlib.nullcontext()
    try:
        with _disable_current_modes(), watching:
            yield
    finally:
        contract.swap_inside_kernel(outer)


@functools.lru_cache(maxsize=1)
def _prepare_core() -> None:
    """Patch the part of Triton's language that its own functions use, once a process, as Triton's first call would.

    Faster versions of what the interpreter does for each operation and launch are patched in, too.
    """
    from triton.language import core, semantic
    from triton.runtime import interpreter, jit

    from tritonite.language import interned, interpreted, launches, shortcuts

    interpreter._patch_attr = shortcuts.patch_one(interpreter._patch_attr, interpreter.interpreter_semantic)
    interpreter._patch_lang(triton.language.cdiv.fn)
    interpreter._get_np_dtype = interpreted.by_name(interpreter._get_np_dtype)
    interpreter._patch_builtin = interned.patch_builtins(interpreter._patch_attr)
    core._unwrap_if_constexpr = interned.unwrap(core._unwrap_if_constexpr)
    core.tensor.__init__ = interned.tensor(core.tensor.__init__)
    core.block_type.__init__ = interned.block_type(core.block_type.__init__)
    core.block_type.with_element_ty = interned.with_element_ty(core.block_type.with_element_ty)
    core.block_type.to_ir = shortcuts.block_to_ir(core.block_type.to_ir)
    interpreter._patch_lang_core = shortcuts.patch_core(interpreter._patch_lang_core)
    jit.ConstexprFunction.__call__ = shortcuts.call_constexpr(jit.ConstexprFunction.__call__)
    interpreter.GridExecutor.__init__ = launches.initialise
    for kind in (core.dtype, core.pointer_type, core.block_type):
        kind.__eq__ = interned.equality(kind.__eq__)
    interpreter.TensorHandle.__init__ = shortcuts.handle(interpreter.TensorHandle.__init__)
    checked = shortcuts.checked(semantic.TritonSemantic.binary_op_type_checking_impl)
    semantic.TritonSemantic.binary_op_type_checking_impl = checked
    semantic.TritonSemantic.broadcast_impl_value = shortcuts.broadcast(semantic.TritonSemantic.broadcast_impl_value)


def on_host(values: Any) -> Any:
    """Return a kernel's arguments with CPU tensors over the memory of tensors on an interpreted device."""
    return values if _ALL_ON_CPU else _on_host(values)


# Where all devices are CPUs, tensors are arguments as they are.
_ALL_ON_CPU = all(device.type == "cpu" for device in devices.present)


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if value.device.type == "cpu" else devices.of(value.device).runtime.host_view(value)
    if isinstance(value, dict):
        return {name: _on_host(item) for name, item in value.items()}
    if isinstance(value, TensorDescriptor):
        return dataclasses.replace(value, base=_on_host(value.base))
    if isinstance(value, tuple):
        return retyped(value, [_on_host(item) for item in value])
    return value


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Change Triton's interpreter within the with block, in which a kernel runs.

    - One kernel runs at a time, because the interpreter keeps its state in module globals.
    - ATen's operators, which the interpreter calls, are neither overridden nor recorded.
    - Integer operators wrap around, as on a GPU, instead of checking for overflow.
    - Integer arguments from 2**31 to 2**32 - 1 have 64 bits, as their type says.
    - A failing assertion, which would stop a GPU, raises Decline, so that ATen raises its error.

    Raises InvalidDeclaration for a kernel that branches on a block.
    """
    from triton.runtime import interpreter
    from triton.runtime.errors import InterpreterError
    from triton.runtime.interpreter import InterpreterOptions, interpreter_builder

    from tritonite.language import interpreted, launches, shortcuts

    dot = interpreted.dot_in_order if contract.settings().invariant else interpreted.dot
    changes = {
        "options": InterpreterOptions(debug=True, sanitize_overflow=False),
        "binary_op": functools.partial(interpreted.arithmetic, interpreter_builder, "binary_op"),
        "unary_op": functools.partial(interpreted.arithmetic, interpreter_builder, "unary_op"),
        "create_assert": interpreted.refuse_unless,
        "cast_impl": functools.partial(interpreted.cast, interpreter_builder),
        "create_fp_to_fp": functools.partial(interpreted.to_float8, interpreter_builder),
        "create_dot": functools.partial(dot, interpreter_builder),
        "create_splat": functools.partial(interpreted.splat, interpreter_builder),
        "create_expand_dims": shortcuts.expand_dims,
    }
    contract.note_launch()
    with _lock:
        _prepare_core()
        outer = contract.swap_inside_kernel(True)
        semantic = interpreter.interpreter_semantic
        saved, caller = dict(vars(interpreter_builder)), InterpretedFunction.__call__
        execute = GridExecutor.__call__
        constant, convert = semantic.scalar_constant, interpreter._implicit_cvt
        patch_tensor, reduce = interpreter._patch_lang_tensor, interpreter.ReduceOps.generic_reduce
        vars(interpreter_builder).update(changes)
        semantic.scalar_constant = functools.partial(interpreted.scalar_constant, semantic, constant)
        interpreter._implicit_cvt = functools.partial(launches.argument, convert)
        interpreter._patch_lang_tensor = functools.partial(interpreted.patch_tensor, patch_tensor, semantic)
        interpreter.ReduceOps.generic_reduce = lambda *given: interpreted.reduce_pairwise(reduce, *given)
        # Triton's own call patches its whole language again for every function that a kernel calls, which is slow.
        InterpretedFunction.__call__ = lambda function, *args, **kwargs: function.rewrite()(*args, **kwargs)
        if execute is launches.EXECUTE:
            GridExecutor.__call__ = launches.execute
        try:
            with progress.timed("interpreting", _INTERPRETED), np.errstate(all="ignore"), _disable_current_modes():
                yield
        except InterpreterError as error:
            if isinstance(error.__cause__, (Decline, InvalidDeclaration)):
                raise error.__cause__ from None
            raise
        finally:
            contract.swap_inside_kernel(outer)
            vars(interpreter_builder).clear()
            vars(interpreter_builder).update(saved)
            InterpretedFunction.__call__ = caller
            GridExecutor.__call__ = execute
            semantic.scalar_constant = constant
            interpreter._implicit_cvt = convert
            interpreter._patch_lang_tensor = patch_tensor
            interpreter.ReduceOps.generic_reduce = reduce
