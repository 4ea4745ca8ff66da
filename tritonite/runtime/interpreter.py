"""Triton's interpreter: what is changed in it while it runs a kernel, and host code that reads data on the CPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import numpy as np
import triton
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

from tritonite.errors import Decline, InvalidDeclaration
from tritonite.runtime import contract, progress
from tritonite.runtime.locks import fork_safe_lock

_INTERPRETED = (
    "kernels run in Triton's interpreter on the CPU, thousands of times slower than on a GPU: no GPU is used here, or "
    "TRITON_INTERPRET is set"
)
_lock = fork_safe_lock()


@contextlib.contextmanager
def looking() -> Iterator[None]:
    """Within it a host function looks at data on the CPU, by ATen's operators, and no plan repeats its call.

    A dry recorder watches, so that nothing is written and no memory is read that holds nothing.
    """
    outer = contract.swap_inside_kernel(True)
    recorder = contract.recorder()
    if recorder is not None:
        recorder.unrecordable("data that the host looks at")
    watching = recorder.watch() if recorder is not None and recorder.dry else contextlib.nullcontext()
    try:
        with _disable_current_modes(), watching:
            yield
    finally:
        contract.swap_inside_kernel(outer)


@functools.lru_cache(maxsize=1)
def _prepare_core() -> None:
    """Prepare what Triton's own functions call of its language, for the process, as the first call of one would."""
    from triton.runtime import interpreter

    from tritonite.language import interpreted

    interpreter._patch_lang(triton.language.cdiv.fn)
    interpreter._get_np_dtype = interpreted.by_name(interpreter._get_np_dtype)


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """The interpreter keeps its state in module globals, so one kernel runs at a time.

    It calls ATen, which is neither overridden nor recorded then. Overflow checks go off: integer operators wrap around,
    in the interpreter as on a GPU. Where an assertion fails, which stops a GPU, ATen is left to raise its error. Raises
    InvalidDeclaration for a kernel that branches on a block.
    """
    from triton.runtime import interpreter
    from triton.runtime.errors import InterpreterError
    from triton.runtime.interpreter import InterpreterOptions, interpreter_builder

    from tritonite.language import interpreted

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
    }
    contract.note_launch()
    with _lock:
        _prepare_core()
        outer = contract.swap_inside_kernel(True)
        semantic = interpreter.interpreter_semantic
        saved, caller = dict(vars(interpreter_builder)), InterpretedFunction.__call__
        constant = semantic.scalar_constant
        patch_tensor, reduce = interpreter._patch_lang_tensor, interpreter.ReduceOps.generic_reduce
        vars(interpreter_builder).update(changes)
        semantic.scalar_constant = functools.partial(interpreted.scalar_constant, semantic, constant)
        interpreter._patch_lang_tensor = functools.partial(interpreted.patch_tensor, patch_tensor)
        interpreter.ReduceOps.generic_reduce = lambda *given: interpreted.reduce_by_halves(reduce, *given)
        # Triton's own prepares all of its language anew for every function that a kernel calls, in milliseconds.
        InterpretedFunction.__call__ = lambda function, *args, **kwargs: function.rewrite()(*args, **kwargs)
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
            semantic.scalar_constant = constant
            interpreter._patch_lang_tensor = patch_tensor
            interpreter.ReduceOps.generic_reduce = reduce
