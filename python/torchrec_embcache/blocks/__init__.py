"""Block-level saves and loads, behind `serialize`.

`saver` and `loader` have RecIS' signatures and the filter; `given` checks what users give to them. `schema` says which blocks a
table has. `writer` and `reader` turn rows into blocks and back. The files, their publication, locks and removal are the core's
(`rust/core/src/checkpoint/blocks`).
"""
