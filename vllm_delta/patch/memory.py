"""Raw memory inside numba loops: typed views of an address, and prefetch.

A whole patch is one call, whatever the number of parameters, so the loops take tables of
addresses. Whoever fills a table has checked every offset against the storage it is for.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic


@intrinsic
def pointer(typing_context: Any, address: Any) -> Any:
    """`pointer(address)`: an integer address as a void pointer, for `numba.carray`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.uintp), generate


def _prefetch(for_write: bool) -> Any:
    @intrinsic
    def prefetch(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            i32 = ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, i32, i32, i32])
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
            place = builder.inttoptr(args[0], cgutils.voidptr_t)
            keep_close, data = ir.Constant(i32, 3), ir.Constant(i32, 1)
            builder.call(function, [place, ir.Constant(i32, int(for_write)), keep_close, data])
            return context.get_dummy_value()

        return types.void(types.uintp), generate

    return prefetch


prefetch_read = _prefetch(for_write=False)
prefetch_write = _prefetch(for_write=True)
"""`prefetch_*(address)`: ask for the cache line of an address; a bad address does nothing."""
