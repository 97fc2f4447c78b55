"""Checkpoints: `Saver`, its reports, and the sessions that every way to save or load a checkpoint uses.

A session owns the native save or load: only the session calls the native begin, publish and abandon functions, and it abandons an
unfinished save after an error or an interrupt. The caller of a session decides which ranks take part (`ranks`) and which rows are
written.

| session | purpose | used by |
| --- | --- | --- |
| `_save.SaveSession` | a checkpoint that the coordinator creates and publishes | `Saver`, DCP's `finish`, `convert` |
| `_async.AsyncSaveSession` | a checkpoint of one snapshot, written by a background thread | `Saver.save_async` |
| `_part.PartSession` | the files that one rank writes before any rank knows the checkpoint | DCP's `write_data` and `stage` |
| `_load.LoadSession` | a checkpoint that is read, and the tables whose rows it replaces | `Saver.load`, DCP's reader |
| `_merge.CheckpointMerge` | a chain of checkpoints that is merged | `Saver.compact` |

Before a session selects the rows to write, `model._evict.sweep_before_save` applies the eviction policies that run at saves.
`Saver`, DCP's `stage` and `write_data`, and `BlockSaver` call it once per save.

`_references` records the checkpoints that files of other programs, such as Lightning's, refer to, so that these checkpoints are
kept as long as the files.
"""

from ._progress import Progress
from .reports import LoadReport, SaveReport
from .saver import Saver

__all__ = ["LoadReport", "Progress", "SaveReport", "Saver"]
