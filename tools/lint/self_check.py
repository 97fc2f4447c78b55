"""The rules find the violations in small examples."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from layers import circle, file_imports, imported_files
from sizes import python_functions, rust_functions
from sources import python_imports, report, rust_imports
from stubs import positional_booleans, types_without_names
from texts import doc_comments, is_fragment


def examples(folder: Path) -> None:
    """Raises AssertionError if a rule misses a violation."""
    for name, source in (
        ("a.rs", "/// Bytes of a block,\nconst A: u8 = 1;\n    /// and of\n    /// two.\n"),
        ("a.py", '"""and so on"""\n'),
    ):
        (folder / name).write_text(source)
        texts = list(doc_comments(folder / name))
        assert all(is_fragment(text) for _, text in texts), texts
        assert len(texts) == name.endswith("rs") + 1
    source = "use crate::{cache::Table, rows::{a, b}};\nfn f() { crate::ssd::g() } // crate::host"
    assert rust_imports(source) == {"cache", "rows", "ssd"}
    assert python_imports("from .cache import Lookup\nimport torchrec.sparse") >= {
        "torchrec_embcache.cache",
        "torchrec.sparse",
    }
    layer = folder / "layer"
    layer.mkdir()
    (layer / "one.rs").write_text("use crate::layer::two::Two;\n#[cfg(test)]\nmod tests;\n")
    (layer / "two.rs").write_text("use super::three::{Three, THREE};")
    (layer / "three.rs").write_text("fn f() { super::one::g() }")
    (layer / "four.rs").write_text("use crate::layer::one;")
    assert file_imports(layer) == {"one": {"two"}, "two": {"three"}, "three": {"one"}, "four": {"one"}}
    assert circle(file_imports(layer)) == ["one", "three", "two"]
    names = {"cache", "rows", "modules/__init__", "modules/tables"}
    source = (
        "from . import rows, _native\nif a:\n    from .cache import A\ndef f():\n    from .modules import tables, B\n"
    )
    assert imported_files(source, "torchrec_embcache", names) == names
    source = "fn a(\n    b: u8,\n) {\n    c();\n}\ntrait T {\n    fn d();\n    fn e() {}\n}\n"
    assert list(rust_functions(source)) == [("a", 5), ("d", 1), ("e", 1)]
    assert list(python_functions('def a(b):\n    """Say.\n\n    More.\n    """\n    return b\n')) == [("a", 2)]
    source = "def f(a: bool, b: int): ...\nclass C:\n    def g(self, c: bool | None = None, *, d: bool): ...\n"
    assert set(positional_booleans(source)) == {"f(a)", "C.g(c)"}
    source = "A = tuple[int, int]\nclass B:\n    c: list[dict[str, int]]\n    def d(self, e: Any) -> list[int]: ...\n"
    assert set(types_without_names(source)) == {"line 1: tuple", "line 3: dict", "line 4: Any"}
    below = "torchrec_embcache.distributed"
    assert python_imports("from ..cache import Lookup", below) == {
        "torchrec_embcache.cache",
        "torchrec_embcache.cache.Lookup",
    }
    assert python_imports("from . import lookup", below) == {below, below + ".lookup"}


def rules_find_violations() -> Iterator[str]:
    """The rules find the violations in small examples."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            examples(Path(folder))
        except AssertionError as error:
            place = error.__traceback__.tb_next if error.__traceback__ is not None else None
            yield f"self_check.py:{place.tb_lineno if place is not None else 0}: {error}"


RULES = (rules_find_violations,)

if __name__ == "__main__":
    sys.exit(report(*RULES) > 0)
