"""RecIS-format saves and loads, the implementation of `serialize`.

`saver` and `loader` have RecIS' signatures and the filter; `_arguments` validates the arguments of users. `_schema` defines the
blocks of a table. `_writer` and `_reader` convert rows to blocks and back. The native extension handles files, publication, locks
and removal (`rust/core/src/checkpoint/recis`).
"""
