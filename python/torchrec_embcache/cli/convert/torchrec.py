"""Layout `torchrec-dcp`: checkpoints of TorchRec's own tables; see `torchrec_dcp` and `torchrec_dcp_writer`.

They import `torch.distributed.checkpoint`, and only when they are used.
"""

from pathlib import Path
from typing import Any

from torchrec_embcache._fs import DirectoryHandle
from torchrec_embcache.cli.checkpoints import OpenCheckpoint

from .layout import CheckpointLayout, ConvertSettings, StoredTable

__all__ = ["TorchrecLayout"]


class TorchrecLayout(CheckpointLayout):
    """Reads and writes TorchRec's tables in the format of `torch.distributed.checkpoint`."""

    name = "torchrec-dcp"
    marks = (".metadata",)
    is_writable = True
    import_options = (*CheckpointLayout.import_options, "model_key")
    export_options = ("model_key", "optimizer_key", "rows", "sequences", "rename", "skip")
    omitted = "the steps and OOV rows of tables, and the counts, steps and scores of rows"

    def read(self, path: Path) -> tuple[list[StoredTable], list[str]]:
        """Implements `CheckpointLayout`."""
        from .torchrec_dcp import read_tables

        return read_tables(path)

    def write(self, opened: OpenCheckpoint, target: DirectoryHandle, settings: ConvertSettings) -> list[dict[str, Any]]:
        """Implements `CheckpointLayout`."""
        from .torchrec_dcp_writer import write_tables

        return write_tables(opened, target, settings)
