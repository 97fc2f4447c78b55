"""RecIS-format saves and loads, the implementation of `serialize`.

`saver` and `loader` have RecIS' signatures and the filter; `given` validates the arguments of users. `schema` defines the blocks of
a table. `writer` and `reader` convert rows to blocks and back. The native extension handles files, publication, locks and removal
(`rust/core/src/checkpoint/blocks`).
"""
